//! The order in which a device lays out an array's dimensions.
//!
//! Programs may be compiled for other orders than the plugin's default, and a plugin that is given a buffer of another
//! order than its program was compiled for may read it wrongly without a word. So a copy that goes over the host, or to
//! another worker, gets the order of its source. Clients take one kind of memory out of this: what they copy to
//! `unpinned_host` they believe to lie in the default order.

use waystation_pjrt::Buffer;
use waystation_proto::{tensorflow::StatusProto, xla::LayoutProto};

use crate::status;

/// The dimensions, the one that varies fastest first; `None` is the plugin's default.
pub(crate) type Order = Option<Vec<i64>>;

/// The order of a buffer's dimensions.
pub(crate) fn of_buffer(buffer: &Buffer) -> Order {
    // A plugin that does not tell has its default only.
    let order = buffer.minor_to_major().ok().flatten()?;
    normal(order, buffer.dims())
}

/// The memory whose arrays have the default order only.
const UNPINNED_HOST: &str = "unpinned_host";

/// The order of an array's copy in another memory.
pub(crate) fn of_copy(order: Order, memory_kind: &str) -> Order {
    order.filter(|_| memory_kind != UNPINNED_HOST)
}

/// The order that a client asks for.
pub(crate) fn of_proto(layout: Option<&LayoutProto>, dims: &[i64]) -> Result<Order, StatusProto> {
    let Some(layout) = layout.filter(|layout| !layout.minor_to_major.is_empty()) else {
        return Ok(None);
    };
    let order = &layout.minor_to_major;
    let mut sorted = order.clone();
    sorted.sort_unstable();
    if !sorted.into_iter().eq((0..).take(dims.len())) {
        return Err(status::invalid(format!(
            "the layout {order:?} does not fit an array of {dims:?}"
        )));
    }
    if !layout.tiles.is_empty() {
        return Err(status::unimplemented(format!(
            "putting an array with a tiled layout ({order:?}) is not built; leave the layout to the plugin"
        )));
    }
    Ok(normal(order.clone(), dims))
}

/// No order where it is the default, or says nothing because there are no elements: some plugins break on those.
fn normal(order: Vec<i64>, dims: &[i64]) -> Order {
    let row_major = order.iter().rev().copied().eq((0..).take(dims.len()));
    (!row_major && !dims.contains(&0)).then_some(order)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(minor_to_major: &[i64], dims: &[i64]) -> Result<Order, i32> {
        let layout = LayoutProto {
            minor_to_major: minor_to_major.to_vec(),
            ..LayoutProto::default()
        };
        of_proto(Some(&layout), dims).map_err(|status| status.code)
    }

    #[test]
    fn only_what_differs_from_the_default_is_kept() {
        assert_eq!(asked(&[1, 0], &[2, 3]), Ok(None));
        assert_eq!(asked(&[0, 1], &[2, 3]), Ok(Some(vec![0, 1])));
        assert_eq!(asked(&[0, 1], &[0, 3]), Ok(None));
        assert_eq!(asked(&[], &[]), Ok(None));
        assert_eq!(of_proto(None, &[2, 3]), Ok(None));
    }

    #[test]
    fn copies_keep_the_order_but_for_one_memory() {
        let order = Some(vec![0, 1]);
        assert_eq!(of_copy(order.clone(), "device"), order);
        assert_eq!(of_copy(order.clone(), ""), order);
        assert_eq!(of_copy(order, "unpinned_host"), None);
    }

    #[test]
    fn layouts_that_do_not_fit_are_refused() {
        assert_eq!(asked(&[0, 0], &[2, 3]), Err(3));
        assert_eq!(asked(&[0], &[2, 3]), Err(3));
        assert_eq!(asked(&[0, 1, 2], &[2, 3]), Err(3));
    }
}
