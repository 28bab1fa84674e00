//! What of a program's devices is part of its key, beside their number.
//!
//! An executable for CPUs runs on any of them. One for an accelerator may be made for how its devices are connected, so the
//! places of the devices count, and of how many the worker's whole part consists. What tells devices of one place apart (ids,
//! hosts, names) does not.

use waystation_pjrt::{Client, OptionValue};

/// Attributes of a device that say what it is or where it lies.
const PLACES: [&str; 5] = [
    "compute_capability",
    "coords",
    "core_count",
    "core_on_chip",
    "num_cores",
];

/// The key's part for a program on these devices (the plugin's ids, in logical order); `None` where it is of no matter.
pub(crate) fn of_program(client: &Client, devices: &[i32]) -> Option<(String, String)> {
    if client.platform_name() == "cpu" {
        return None;
    }
    let places = devices.iter().map(|id| {
        let device = client.devices().iter().find(|device| device.id() == *id);
        device.map_or_else(String::new, |device| {
            place(device.kind(), device.attributes())
        })
    });
    let places: Vec<_> = places.collect();
    let all = client.devices().len();
    Some((
        "topology".to_owned(),
        format!("of {all}: {}", places.join("; ")),
    ))
}

fn place(kind: &str, attributes: &[(String, OptionValue)]) -> String {
    let mut place = kind.to_owned();
    for name in PLACES {
        if let Some((_, value)) = attributes.iter().find(|(known, _)| known == name) {
            place += &format!(" {name}={value:?}");
        }
    }
    place
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_count_and_numbers_do_not() {
        let device = |x: i64, id: i64| {
            place(
                "TPU v5",
                &[
                    ("coords".to_owned(), OptionValue::Int64List(vec![x, 0, 0])),
                    ("id".to_owned(), OptionValue::Int64(id)),
                ],
            )
        };
        assert_eq!(device(1, 3), device(1, 4));
        assert_ne!(device(1, 3), device(2, 3));
        assert!(device(1, 3).starts_with("TPU v5 coords="));
    }
}
