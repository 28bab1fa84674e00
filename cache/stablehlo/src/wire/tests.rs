use super::*;
use proptest::prelude::*;

/// 1: varint 150, written as protobuf's documentation shows it; 2: "testing"; 1 again: 3; 7: fixed32; 8: fixed64.
const SAMPLE: &[u8] = &[
    0x08, 0x96, 0x01, 0x12, 0x07, b't', b'e', b's', b't', b'i', b'n', b'g', 0x08, 0x03, 0x3d, 1, 2,
    3, 4, 0x41, 1, 0, 0, 0, 0, 0, 0, 0,
];

#[test]
fn fields_are_read_and_an_untouched_message_is_written_back_byte_for_byte() {
    let message = Message::parse(SAMPLE).expect("valid");
    assert_eq!(
        message.fields().collect::<Vec<_>>(),
        [
            (1, Value::Varint(150)),
            (2, Value::Bytes(b"testing")),
            (1, Value::Varint(3)),
            (7, Value::Fixed32(0x0403_0201)),
            (8, Value::Fixed64(1)),
        ]
    );
    assert_eq!(
        message.varint(1),
        Ok(Some(3)),
        "the last occurrence of a scalar counts"
    );
    assert_eq!(message.encode(), SAMPLE);
}

#[test]
fn an_overlong_varint_of_an_untouched_field_is_kept() {
    let bytes = [0x08, 0x81, 0x80, 0x00, 0x10, 0x05];
    let mut message = Message::parse(&bytes).expect("valid");
    message.set_varint(2, 6);
    assert_eq!(message.encode(), [0x08, 0x81, 0x80, 0x00, 0x10, 0x06]);
}

#[test]
fn set_takes_the_first_place_and_removes_the_other_occurrences() {
    let mut message = Message::parse(SAMPLE).expect("valid");
    message.set_varint(1, 9);
    assert_eq!(
        message.fields().map(|(n, _)| n).collect::<Vec<_>>(),
        [1, 2, 7, 8]
    );
    assert_eq!(message.varint(1), Ok(Some(9)));
    message.set_bytes(3, b"new");
    message.remove(7);
    assert_eq!(
        message.fields().map(|(n, _)| n).collect::<Vec<_>>(),
        [1, 2, 8, 3]
    );
    assert_eq!(
        message.message(3).expect("bytes").as_deref(),
        Some(&b"new"[..])
    );
}

#[test]
fn occurrences_of_a_message_field_merge_by_concatenation() {
    let mut message = Message::default();
    message.push_bytes(3, &[0x08, 0x01]);
    message.push_varint(4, 1);
    message.push_bytes(3, &[0x10, 0x02]);
    assert_eq!(
        message.message(3).expect("bytes").as_deref(),
        Some(&[0x08, 0x01, 0x10, 0x02][..])
    );
}

#[test]
fn packed_and_plain_runs_of_integers_are_one_list() {
    let mut message = Message::default();
    message.push_varint(1, 300);
    message.push_bytes(1, &[0xac, 0x02, 0x05]);
    assert_eq!(message.varints(1), Ok(vec![300, 300, 5]));
}

#[test]
fn map_entries_are_sorted_in_the_places_they_took() {
    let mut message = Message::default();
    for entry in [&b"c"[..], b"a", b"b"] {
        message.push_bytes(7, entry);
        message.push_varint(1, 0);
    }
    message.sort_occurrences(7, |value| match value {
        Value::Bytes(bytes) => bytes.to_vec(),
        _ => Vec::new(),
    });
    assert_eq!(message.repeated(7), Ok(vec![&b"a"[..], b"b", b"c"]));
    assert_eq!(
        message.fields().map(|(n, _)| n).collect::<Vec<_>>(),
        [7, 1, 7, 1, 7, 1]
    );
}

#[test]
fn what_is_not_a_message_is_refused() {
    assert_eq!(
        Message::parse(&[0x08]),
        Err(Error::Truncated {
            offset: 1,
            length: 1
        })
    );
    assert_eq!(
        Message::parse(&[0x12, 0x05, 1]),
        Err(Error::Truncated {
            offset: 2,
            length: 3
        })
    );
    assert_eq!(
        Message::parse(&[0x0b]),
        Err(Error::Invalid {
            what: "wire type",
            offset: 0
        })
    );
    assert_eq!(
        Message::parse(&[0x00, 0x00]),
        Err(Error::Invalid {
            what: "field number",
            offset: 0
        })
    );
    assert_eq!(
        Message::parse(&[0xff; 11]),
        Err(Error::Invalid {
            what: "varint",
            offset: 0
        })
    );
    let huge = [
        0x12, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x01,
    ];
    assert!(
        matches!(Message::parse(&huge), Err(Error::Truncated { .. })),
        "no overflow on a length of 2^64 - 1"
    );
    let message = Message::parse(&[0x08, 0x01]).expect("valid");
    assert_eq!(
        message.message(1),
        Err(Error::WireType {
            number: 1,
            expected: "length-delimited"
        })
    );
}

proptest! {
    #[test]
    fn any_bytes_are_refused_or_written_back(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        if let Ok(message) = Message::parse(&bytes) {
            prop_assert_eq!(message.encode(), bytes.clone());
        }
    }

    #[test]
    fn a_varint_is_read_as_written(value in any::<u64>()) {
        let mut bytes = Vec::new();
        write_varint(&mut bytes, value);
        let mut at = 0;
        prop_assert_eq!(read_varint(&bytes, &mut at), Ok(value));
        prop_assert_eq!(at, bytes.len());
    }
}
