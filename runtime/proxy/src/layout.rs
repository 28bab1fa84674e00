//! The device layouts that clients ask for, in the three forms in which they write them.

use prost::Message as _;
use waystation_proto::xla::{
    LayoutProto,
    ifrt::{CompactLayoutProto, PjRtLayoutProto, Serialized},
};

use crate::status::{self, Status};

/// The names under which jaxlib registers its layout messages.
const PJRT_LAYOUT: &str = "xla::ifrt::PjRtLayout";
const COMPACT_LAYOUT: &str = "xla::ifrt::CompactLayout";

/// A layout that comes as a message of its own; none is the plugin's default.
///
/// # Errors
/// INVALID_ARGUMENT for a malformed one, UNIMPLEMENTED for a kind that is not known.
pub(crate) fn of_message(layout: Option<&Serialized>) -> Result<Option<LayoutProto>, Status> {
    let Some(layout) = layout.filter(|l| !l.type_name.is_empty()) else {
        return Ok(None);
    };
    let bad = |e: prost::DecodeError| status::invalid_argument(format!("malformed layout: {e}"));
    let data = layout.data.clone();
    match layout.type_name.as_str() {
        PJRT_LAYOUT => Ok(PjRtLayoutProto::decode(data).map_err(bad)?.xla_layout),
        COMPACT_LAYOUT => {
            let order = CompactLayoutProto::decode(data)
                .map_err(bad)?
                .major_to_minor;
            Ok(Some(in_order(
                order.into_iter().rev().map(i64::from).collect(),
            )))
        }
        other => Err(status::unimplemented(format!(
            "layouts of type '{other}' are not served"
        ))),
    }
}

/// A layout as XLA writes it, the minor dimension first: `{1,0}`, `{0,1:E(4)}`. Array specs have it in this form.
///
/// # Errors
/// INVALID_ARGUMENT for a malformed one, UNIMPLEMENTED for one with more to it than an order.
pub(crate) fn of_text(layout: Option<&[u8]>) -> Result<Option<LayoutProto>, Status> {
    let Some(bytes) = layout else {
        return Ok(None);
    };
    let text = String::from_utf8_lossy(bytes);
    let bad = || status::invalid_argument(format!("malformed layout '{text}'"));
    let inner = text
        .strip_prefix('{')
        .and_then(|rest| rest.strip_suffix('}'))
        .ok_or_else(bad)?;
    let (order, rest) = inner.split_once(':').unwrap_or((inner, ""));
    // The size of narrow elements follows from the type; memory spaces have names of their own in IFRT.
    if !(rest.is_empty() || rest.starts_with("E(") || rest.starts_with("S(")) {
        return Err(status::unimplemented(format!(
            "the layout '{text}' is not served, only orders of dimensions"
        )));
    }
    let order = order
        .split(',')
        .filter(|dimension| !dimension.is_empty())
        .map(|dimension| dimension.trim().parse().map_err(|_| bad()))
        .collect::<Result<_, _>>()?;
    Ok(Some(in_order(order)))
}

fn in_order(minor_to_major: Vec<i64>) -> LayoutProto {
    LayoutProto {
        minor_to_major,
        ..LayoutProto::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(layout: &str) -> Result<Vec<i64>, i32> {
        match of_text(Some(layout.as_bytes())) {
            Ok(layout) => Ok(layout.expect("given").minor_to_major),
            Err(status) => Err(status.code),
        }
    }

    #[test]
    fn text_is_read_as_xla_writes_it() {
        assert_eq!(text("{1,0}"), Ok(vec![1, 0]));
        assert_eq!(text("{}"), Ok(vec![]));
        assert_eq!(text("{0,1:E(4)}"), Ok(vec![0, 1]));
        assert_eq!(text("{0:S(5)}"), Ok(vec![0]));
        assert_eq!(text("{1,0:T(8,128)}"), Err(12));
        for wrong in ["", "{", "1,0", "{a}", "{1,0}x"] {
            assert_eq!(text(wrong), Err(3), "{wrong}");
        }
        assert_eq!(of_text(None), Ok(None));
    }

    #[test]
    fn messages_say_the_same() {
        let message = |type_name: &str, data: Vec<u8>| Serialized {
            type_name: type_name.to_owned(),
            data: data.into(),
        };
        let compact = CompactLayoutProto {
            version_number: 0,
            major_to_minor: vec![1, 0, 2],
        };
        let pjrt = PjRtLayoutProto {
            version_number: 0,
            xla_layout: Some(in_order(vec![2, 0, 1])),
        };
        for layout in [
            message(COMPACT_LAYOUT, compact.encode_to_vec()),
            message(PJRT_LAYOUT, pjrt.encode_to_vec()),
        ] {
            let read = of_message(Some(&layout)).expect("readable");
            assert_eq!(read, Some(in_order(vec![2, 0, 1])), "{}", layout.type_name);
        }
        assert_eq!(of_message(None), Ok(None));
        let other = message("another", Vec::new());
        assert_eq!(of_message(Some(&other)).expect_err("unknown").code, 12);
        let broken = message(PJRT_LAYOUT, vec![0xff]);
        assert_eq!(of_message(Some(&broken)).expect_err("malformed").code, 3);
    }
}
