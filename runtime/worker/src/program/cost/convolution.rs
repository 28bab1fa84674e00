//! How many products a convolution sums: of each window, only the positions that lie on an element of the input.

use std::ops::RangeInclusive;

use waystation_proto::xla::{HloInstructionProto, ShapeProto, WindowDimension};

use super::{
    Error,
    shape::{count, product},
};

/// Steps that one spatial dimension may take to count. Real programs take as many as their kernels are wide.
const MAX_STEPS: i64 = 1 << 22;

/// Products that a convolution of `input` with `kernel` sums.
pub(super) fn products(
    convolution: &HloInstructionProto,
    input: &ShapeProto,
    kernel: &ShapeProto,
    output: &ShapeProto,
) -> Result<f64, Error> {
    let numbers = convolution
        .convolution_dimension_numbers
        .as_ref()
        .ok_or(Error::Incomplete("a convolution's dimension numbers"))?;
    let window = convolution
        .window
        .as_ref()
        .map_or(&[][..], |window| &window.dimensions);
    let features =
        size(input, numbers.input_feature_dimension)? / convolution.feature_group_count.max(1);
    let batch = size(input, numbers.input_batch_dimension)? / convolution.batch_group_count.max(1);
    let mut products = count(product(&[
        features,
        size(output, numbers.output_feature_dimension)?,
        batch,
    ])?);
    for (index, dimension) in window.iter().enumerate() {
        let at = |dimensions: &[i64]| {
            dimensions
                .get(index)
                .copied()
                .ok_or(Error::Incomplete("a convolution's spatial dimensions"))
        };
        let positions = positions(
            size(input, at(&numbers.input_spatial_dimensions)?)?,
            size(kernel, at(&numbers.kernel_spatial_dimensions)?)?,
            size(output, at(&numbers.output_spatial_dimensions)?)?,
            dimension,
        )?;
        products *= count(positions);
    }
    Ok(products)
}

fn size(shape: &ShapeProto, dimension: i64) -> Result<i64, Error> {
    let size = usize::try_from(dimension)
        .ok()
        .and_then(|dimension| shape.dimensions.get(dimension).copied())
        .ok_or(Error::Incomplete("a convolution's dimensions"))?;
    if size < 0 { Err(Error::Size) } else { Ok(size) }
}

/// Pairs of a kernel and an output index, in one spatial dimension, that meet on an input element and neither on padding
/// nor on a hole of the dilated input.
///
/// Output `o` and kernel `k` meet at `o * stride + k * window_dilation - padding_low`, which is an element when it is a
/// multiple of the base dilation and in range. The shorter side is walked, the other's share is counted at once: a
/// gradient's kernel can be as long as the input was.
fn positions(input: i64, kernel: i64, output: i64, window: &WindowDimension) -> Result<u64, Error> {
    let (stride, dilation) = (
        i128::from(window.stride.max(1)),
        i128::from(window.window_dilation.max(1)),
    );
    let holes = i128::from(window.base_dilation.max(1));
    let padding = i128::from(window.padding_low);
    let ((short, short_step), (long, step)) = if kernel <= output {
        ((kernel, dilation), (output, stride))
    } else {
        ((output, stride), (kernel, dilation))
    };
    if short > MAX_STEPS {
        return Err(Error::Size);
    }
    let last = (i128::from(input) - 1) * holes;
    let multiples = Multiples::new(step, holes);
    let mut found = 0u64;
    for index in 0..i128::from(short) {
        // Where index 0 of the long side lies; its others follow at `step`.
        let start = index * short_step - padding;
        let first = div_ceil(-start, step).max(0);
        let end = (last - start).div_euclid(step).min(i128::from(long) - 1);
        found = found
            .checked_add(multiples.among(start, first..=end))
            .ok_or(Error::Size)?;
    }
    Ok(found)
}

fn div_ceil(number: i128, divisor: i128) -> i128 {
    -(-number).div_euclid(divisor)
}

/// Solves `start + i * step = 0 (mod modulus)` for `i`.
struct Multiples {
    /// The greatest common divisor of step and modulus.
    divisor: i128,
    /// The solutions repeat after so many.
    period: i128,
    /// What times `step / divisor` is 1 modulo the period.
    inverse: i128,
}

impl Multiples {
    /// Both at least 1 and of 64 bits.
    fn new(step: i128, modulus: i128) -> Multiples {
        // Euclid's algorithm, which keeps `remainder = step * coefficient (mod modulus)` for both pairs.
        let (mut remainder, mut next) = (modulus, step % modulus);
        let (mut coefficient, mut following) = (0, 1);
        while next != 0 {
            let quotient = remainder / next;
            (remainder, next) = (next, remainder - quotient * next);
            (coefficient, following) = (following, coefficient - quotient * following);
        }
        let period = modulus / remainder;
        Multiples {
            divisor: remainder,
            period,
            inverse: coefficient.rem_euclid(period),
        }
    }

    /// How many of `indices` solve it.
    fn among(&self, start: i128, indices: RangeInclusive<i128>) -> u64 {
        let (first, last) = indices.into_inner();
        if first > last || start % self.divisor != 0 {
            return 0;
        }
        let target = (-start / self.divisor).rem_euclid(self.period);
        let solution = (target * self.inverse).rem_euclid(self.period);
        // Solutions up to `end`, from the smallest one that is not negative.
        let up_to = |end: i128| (end - solution).div_euclid(self.period) + 1;
        let found = up_to(last) - up_to(first - 1);
        u64::try_from(found).unwrap_or(u64::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As the definition says, pair by pair.
    fn one_by_one(input: i64, kernel: i64, output: i64, window: &WindowDimension) -> u64 {
        let mut found = 0;
        for k in 0..kernel {
            for o in 0..output {
                let at = o * window.stride + k * window.window_dilation - window.padding_low;
                let on_element = at % window.base_dilation == 0;
                if on_element && (0..input).contains(&at.div_euclid(window.base_dilation)) {
                    found += 1;
                }
            }
        }
        found
    }

    #[test]
    fn counting_at_once_is_counting_one_by_one() {
        for (input, kernel, output) in [(8, 3, 8), (3, 8, 5), (1, 1, 1), (7, 4, 16), (0, 2, 3)] {
            for parameters in 0..4 * 4 * 6 * 6 {
                let window = WindowDimension {
                    size: kernel,
                    stride: 1 + parameters % 4,
                    window_dilation: 1 + parameters / 4 % 4,
                    base_dilation: 1 + parameters / 16 % 6,
                    padding_low: parameters / 96 - 2,
                    padding_high: 0,
                };
                assert_eq!(
                    positions(input, kernel, output, &window).unwrap(),
                    one_by_one(input, kernel, output, &window),
                    "{input} {kernel} {output} {window:?}"
                );
            }
        }
    }

    #[test]
    fn hostile_sizes_neither_overflow_nor_take_long() {
        let most = i64::MAX;
        for padding_low in [i64::MIN, -1, 0, most] {
            for step in [i64::MIN, 0, 1, most] {
                let window = WindowDimension {
                    size: most,
                    stride: step,
                    window_dilation: step,
                    base_dilation: most - 1,
                    padding_low,
                    padding_high: most,
                };
                let _ = positions(most, 1000, most, &window);
                assert!(matches!(
                    positions(most, most, most, &window),
                    Err(Error::Size)
                ));
            }
        }
    }
}
