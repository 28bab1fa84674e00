use super::*;

use waystation_proto::waystation::ExecutableInfo;

const KEY: Digest = [9; 32];

fn entry() -> Entry {
    Entry {
        info: ExecutableInfo {
            name: "jit_step".to_owned(),
            num_partitions: 4,
            fingerprint: b"fp".to_vec(),
            ..ExecutableInfo::default()
        },
        // Long enough to be compressed, with a tail that is not all alike.
        executable: Bytes::from([vec![7; 1500], (0..=255).collect::<Vec<u8>>()].concat()),
        text: Text::new(TEXT),
        object: None,
    }
}

const TEXT: &str = "HloModule jit_step ✓";

/// The entry as it comes out of its object.
fn read(entry: Entry, object: &Bytes) -> Entry {
    let checksum = object.last_chunk().copied();
    Entry {
        object: checksum,
        ..entry
    }
}

fn provenance() -> Provenance {
    Provenance {
        writer: "host/1".to_owned(),
        created_unix_ms: 1_800_000_000_000,
        compile_micros: 1_500_000,
        components: vec![("program".to_owned(), "00ff".to_owned())],
    }
}

fn sealed() -> Bytes {
    seal(&KEY, &entry(), &provenance(), &Limits::default()).unwrap()
}

fn refuse(object: impl Into<Bytes>) -> Bad {
    refuse_within(object, &Limits::default())
}

fn refuse_within(object: impl Into<Bytes>, limits: &Limits) -> Bad {
    open(&KEY, &object.into(), limits).expect_err("must be refused")
}

/// Rewrites an entry and gives it a right checksum again: what a liar would do.
fn forged(change: impl FnOnce(&mut Vec<u8>)) -> Bytes {
    let mut object = sealed().to_vec();
    object.truncate(object.len() - CHECKSUM_BYTES);
    change(&mut object);
    let total = (object.len() + CHECKSUM_BYTES) as u64;
    if object.len() >= 24 {
        object[16..24].copy_from_slice(&total.to_le_bytes());
    }
    let checksum: Digest = Sha256::digest(&object).into();
    object.extend_from_slice(&checksum);
    object.into()
}

/// Offset of a field of a row of the table: 0 kind, 4 encoding, 8 stored length, 16 decoded length.
fn row(index: usize, field: usize) -> usize {
    HEADER_BYTES + index * ROW_BYTES + field
}

fn put_u32(object: &mut [u8], at: usize, value: u32) {
    object[at..at + 4].copy_from_slice(&value.to_le_bytes());
}

fn put_u64(object: &mut [u8], at: usize, value: u64) {
    object[at..at + 8].copy_from_slice(&value.to_le_bytes());
}

#[test]
fn an_entry_comes_back_as_it_was() {
    let object = sealed();
    assert!(object.len() < 1500, "the executable is compressed");
    let opened = open(&KEY, &object, &Limits::default()).unwrap();
    assert_eq!(opened.entry, read(entry(), &object));
    assert_eq!(opened.provenance, provenance());
    assert_eq!(opened.stored_bytes, object.len() as u64);
    let text = opened.entry.text.and_then(|text| text.read());
    assert_eq!(text.as_deref(), Some(TEXT));

    let without_text = Entry {
        text: None,
        ..entry()
    };
    let object = seal(&KEY, &without_text, &provenance(), &Limits::default()).unwrap();
    let opened = open(&KEY, &object, &Limits::default()).unwrap();
    assert_eq!(opened.entry, read(without_text, &object));
}

#[test]
fn what_does_not_compress_is_stored_as_it_is() {
    let mut state = 1u64;
    let noise: Vec<u8> = std::iter::repeat_with(|| {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        (state >> 56) as u8
    })
    .take(5000)
    .collect();
    let entry = Entry {
        executable: noise.into(),
        ..entry()
    };
    let object = seal(&KEY, &entry, &provenance(), &Limits::default()).unwrap();
    assert_eq!(object[row(2, 4)], 0, "encoding is raw");
    assert_eq!(
        open(&KEY, &object, &Limits::default()).unwrap().entry,
        read(entry, &object)
    );
}

#[test]
fn the_layout_is_the_documented_one() {
    let object = sealed();
    assert_eq!(&object[..8], b"WAYSTEXE");
    assert_eq!(object[8..12], 1u32.to_le_bytes());
    assert_eq!(object[12..16], 4u32.to_le_bytes());
    assert_eq!(object[16..24], (object.len() as u64).to_le_bytes());
    assert_eq!(object[24..56], KEY);
    let kinds: Vec<u8> = (0..4).map(|i| object[row(i, 0)]).collect();
    assert_eq!(kinds, [1, 2, 3, 4]);
    let (covered, checksum) = object.split_at(object.len() - 32);
    assert_eq!(Sha256::digest(covered).as_slice(), checksum);
}

#[test]
fn a_cut_anywhere_is_found() {
    let object = sealed();
    for length in 0..object.len() {
        let bad = refuse(object.slice(..length));
        assert!(
            matches!(bad, Bad::TooShort { .. } | Bad::Length { .. }),
            "{length}: {bad}"
        );
        assert_eq!(bad.reason(), "corrupt");
    }
}

#[test]
fn a_flip_of_any_bit_is_found() {
    let object = sealed();
    for at in 0..object.len() {
        for bit in 0..8 {
            let mut flipped = object.to_vec();
            flipped[at] ^= 1 << bit;
            refuse(flipped);
        }
    }
}

#[test]
fn bytes_behind_the_end_are_found() {
    let mut object = sealed().to_vec();
    object.push(0);
    assert!(matches!(refuse(object), Bad::Length { .. }));
    // Also where length and checksum are made to fit.
    let bad = refuse(forged(|object| object.push(0)));
    assert!(matches!(bad, Bad::Table(_)), "{bad}");
}

#[test]
fn other_files_are_called_foreign() {
    assert!(matches!(
        refuse(Bytes::from_static(b"PK\x03\x04")),
        Bad::Foreign
    ));
    assert!(matches!(refuse(vec![0; 5000]), Bad::Foreign));
    assert!(matches!(refuse(Bytes::new()), Bad::TooShort { bytes: 0 }));
}

#[test]
fn the_entry_of_another_key_is_refused() {
    let object = sealed();
    let bad = open(&[8; 32], &object, &Limits::default()).unwrap_err();
    assert!(
        matches!(bad, Bad::WrongKey { found } if found == KEY),
        "{bad}"
    );
}

#[test]
fn another_format_is_refused_with_its_number() {
    for found in [0, 2, u32::MAX] {
        let bad = refuse(forged(|object| put_u32(object, 8, found)));
        assert!(
            matches!(bad, Bad::UnknownFormat { found: f } if f == found),
            "{bad}"
        );
    }
}

#[test]
fn lies_in_the_section_table_are_found() {
    type Change = fn(&mut Vec<u8>);
    let lies: [(&str, Change); 14] = [
        ("no sections", |o| put_u32(o, 12, 0)),
        ("a section less", |o| put_u32(o, 12, 3)),
        ("a section more", |o| put_u32(o, 12, 5)),
        ("sections without end", |o| put_u32(o, 12, u32::MAX)),
        ("an unknown kind", |o| put_u32(o, row(3, 0), 9)),
        ("a kind twice", |o| put_u32(o, row(3, 0), 3)),
        ("kinds turned round", |o| {
            put_u32(o, row(0, 0), 2);
            put_u32(o, row(1, 0), 1);
        }),
        ("an unknown encoding", |o| put_u32(o, row(2, 4), 7)),
        ("compressed, but raw", |o| put_u32(o, row(2, 4), 0)),
        ("raw, but compressed", |o| put_u32(o, row(1, 4), 1)),
        ("a stored length past the end", |o| {
            put_u64(o, row(2, 8), 1 << 20)
        }),
        ("a stored length of all", |o| {
            put_u64(o, row(2, 8), u64::MAX)
        }),
        ("a decoded length too small", |o| {
            put_u64(o, row(2, 16), 1000)
        }),
        ("a decoded length too great", |o| {
            put_u64(o, row(2, 16), 100_000)
        }),
    ];
    for (lie, change) in lies {
        let bad = refuse(forged(change));
        assert!(
            matches!(bad, Bad::Table(_) | Bad::Section { .. }),
            "{lie}: {bad}"
        );
    }
    let bad = refuse(forged(|o| put_u64(o, row(2, 16), u64::MAX)));
    assert!(matches!(bad, Bad::SectionTooLarge { .. }), "{bad}");
}

#[test]
fn forged_flips_never_panic_and_never_pass_in_the_frame() {
    let frame = HEADER_BYTES + 4 * ROW_BYTES;
    for at in 0..sealed().len() - CHECKSUM_BYTES {
        let object = forged(|object| object[at] ^= 0x41);
        let accepted = open(&KEY, &object, &Limits::default()).is_ok();
        // Length and checksum are made right again; what a liar writes inside a section is his to say.
        let said = (16..24).contains(&at) || at >= frame;
        assert!(!accepted || said, "byte {at}");
    }
}

#[test]
fn a_compression_bomb_stops_at_the_limit() {
    // 64 MiB of zeros in some kilobytes, stated truthfully and untruthfully.
    let bomb = Entry {
        executable: vec![0; 64 << 20].into(),
        text: None,
        ..entry()
    };
    let object = seal(&KEY, &bomb, &provenance(), &Limits::default()).unwrap();
    assert!(object.len() < 64 << 10);
    let limits = Limits {
        executable: 1 << 20,
        ..Limits::default()
    };
    let bad = refuse_within(object.clone(), &limits);
    assert!(matches!(bad, Bad::SectionTooLarge { .. }), "{bad}");
    let mut liar = object.to_vec();
    liar.truncate(object.len() - CHECKSUM_BYTES);
    put_u64(&mut liar, row(2, 16), 1000);
    let checksum: Digest = Sha256::digest(&liar).into();
    liar.extend_from_slice(&checksum);
    let bad = refuse_within(liar, &limits);
    assert!(matches!(bad, Bad::Section { .. }), "{bad}");
}

#[test]
fn limits_hold_on_both_ways() {
    let object = sealed();
    let limits = Limits {
        object: object.len() as u64 - 1,
        ..Limits::default()
    };
    assert!(matches!(
        refuse_within(object.clone(), &limits),
        Bad::TooLarge { .. }
    ));
    assert!(matches!(
        seal(&KEY, &entry(), &provenance(), &limits),
        Err(SealError::TooLarge {
            section: "entry",
            ..
        })
    ));
    let limits = Limits {
        text: 3,
        ..Limits::default()
    };
    assert!(matches!(
        seal(&KEY, &entry(), &provenance(), &limits),
        Err(SealError::TooLarge {
            section: "text",
            ..
        })
    ));
    let bad = refuse_within(object, &limits);
    assert!(
        matches!(
            bad,
            Bad::SectionTooLarge {
                section: "text",
                ..
            }
        ),
        "{bad}"
    );
}

#[test]
fn a_signature_is_asked_for_where_a_key_is_given() {
    let key = |byte: u8| SigningKey::parse(&[byte; 32]).unwrap();
    let limits = Limits::default();
    let (ours, theirs) = (key(1), key(2));
    let signed = seal_signed(&KEY, &entry(), &provenance(), &limits, Some(&ours)).unwrap();
    let opened = open_signed(&KEY, &signed, &limits, Some(&ours)).unwrap();
    assert_eq!(opened.entry, read(entry(), &signed));
    assert!(open(&KEY, &signed, &limits).is_ok(), "nobody looks");
    for (object, signing) in [(&signed, &theirs), (&sealed(), &ours)] {
        let bad = open_signed(&KEY, object, &limits, Some(signing)).unwrap_err();
        assert!(matches!(bad, Bad::Signature(_)), "{bad}");
        assert_eq!(bad.reason(), "signature");
    }
}

/// Who can write to the bucket makes length and checksum right, and has not the key.
#[test]
fn a_signed_entry_that_was_changed_is_refused_whatever_was_changed() {
    let limits = Limits::default();
    let key = SigningKey::parse(&[1; 32]).unwrap();
    let signed = seal_signed(&KEY, &entry(), &provenance(), &limits, Some(&key)).unwrap();
    for at in 0..signed.len() - CHECKSUM_BYTES {
        let mut object = signed.to_vec();
        object[at] ^= 0x10;
        object.truncate(signed.len() - CHECKSUM_BYTES);
        let checksum: Digest = Sha256::digest(&object).into();
        object.extend_from_slice(&checksum);
        assert!(
            open_signed(&KEY, &object.into(), &limits, Some(&key)).is_err(),
            "byte {at}"
        );
    }
}

#[test]
fn an_entry_without_an_executable_is_no_entry() {
    let empty = Entry {
        executable: Bytes::new(),
        ..entry()
    };
    let object = seal(&KEY, &empty, &provenance(), &Limits::default()).unwrap();
    assert!(matches!(
        refuse(object),
        Bad::Section {
            section: "executable",
            ..
        }
    ));
}

#[test]
fn what_grows_out_of_all_proportion_is_refused_before_it_is_decoded() {
    // A program that is nearly all zeros is stored as it is, and comes back.
    let zeros = Entry {
        executable: Bytes::from(vec![0; 65 << 20]),
        ..entry()
    };
    let object = seal(&KEY, &zeros, &provenance(), &Limits::default()).unwrap();
    assert!(object.len() > 65 << 20);
    let opened = open(&KEY, &object, &Limits::default()).unwrap();
    assert_eq!(opened.entry.executable, zeros.executable);
    assert!(stated_bytes(&object) > 65 << 20);

    let bomb = forged(|object| put_u64(object, row(2, 16), 2 << 30));
    assert!(stated_bytes(&bomb) > 2 << 30);
    let bad = refuse(bomb);
    assert!(bad.to_string().contains("256 times"), "{bad}");
    assert_eq!(bad.reason(), "corrupt");
    for cut in [0, 12, 16, 60, HEADER_BYTES + ROW_BYTES] {
        stated_bytes(&object[..cut]);
    }
}
