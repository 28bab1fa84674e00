use proptest::prelude::*;

use super::*;

fn encode(files: &[DataFile]) -> Vec<u8> {
    let mut table = FileTableBuilder::default();
    for file in files {
        table.add(&Arc::new(file.clone()));
    }
    let mut out = Vec::new();
    table.encode(&mut out).unwrap();
    for (number, file) in table.0.keys().enumerate() {
        assert_eq!(table.id(file), number as u64);
    }
    out
}

fn file(base: &str, name: &str) -> DataFile {
    DataFile::new(base, name).unwrap()
}

#[test]
fn a_table_byte_by_byte() {
    let files = [
        file("p1/", "d/ab"),
        file("p0/", "d/a"),
        file("p0/", "d/b"),
        file("", "d/z"),
    ];
    let bytes = [
        &[4][..],      // files
        &[0, 5, 1],    // in common: ""|p0/, p0/d/|, p|1/
        &[3, 6, 1, 6], // suffixes
        &[0, 3, 3, 3], // base paths
        b"d/zp0/d/ab1/d/ab",
    ]
    .concat();
    assert_eq!(encode(&files), bytes);
    let read = decode(&bytes, "").unwrap();
    let read: Vec<_> = read.iter().map(|file| (file.base(), file.name())).collect();
    assert_eq!(
        read,
        [("", "d/z"), ("p0/", "d/a"), ("p0/", "d/b"), ("p1/", "d/ab")]
    );
    // Under the transitive path of a node in another database.
    let read = decode(&bytes, "x/").unwrap();
    assert_eq!((read[1].base(), read[1].path()), ("x/p0/", "x/p0/d/a"));
    assert_eq!((read[0].base(), read[0].path()), ("x/", "x/d/z"));
}

#[test]
fn an_empty_table() {
    assert_eq!(encode(&[]), [0]);
    assert!(decode(&[0], "").unwrap().is_empty());
}

#[test]
fn paths_that_lead_elsewhere_are_refused() {
    for path in [
        "/etc/passwd",
        "../d/a",
        "d/../../a",
        "d/..",
        "..",
        ".",
        "d/./a",
        "d//a",
        "d/",
        "d\\a",
        "d/\0a",
    ] {
        let mut bytes = vec![1, path.len() as u8, 0];
        bytes.extend_from_slice(path.as_bytes());
        assert!(
            matches!(decode(&bytes, ""), Err(Error::Path { .. })),
            "{path:?}"
        );
        assert!(DataFile::new("", path).is_err(), "{path:?}");
    }
    // Only together with what comes before it.
    assert!(decode(b"\x01\x03\x00./a", "p").is_ok());
    assert!(decode(b"\x01\x03\x00./a", ".").is_err());
    assert!(decode(b"\x01\x02\x00/a", "p/").is_err());
    assert!(DataFile::new("p/", "../a").is_err());
    // No text.
    assert!(matches!(
        decode(b"\x01\x01\x00\xff", ""),
        Err(Error::Path { .. })
    ));
    assert!(matches!(
        decode("\x01\x02\x01ä".as_bytes(), ""),
        Err(Error::Path { .. })
    ));
}

#[test]
fn a_table_that_contradicts_itself_is_refused() {
    let refused = |bytes: &[u8]| decode(bytes, "").is_err();
    assert!(refused(&[0xff, 0xff, 0xff, 0xff, 0x0f]), "a lying count");
    assert!(
        refused(&[2, 5, 1, 1, 0, 0, b'a', b'b']),
        "shares what is not there"
    );
    assert!(refused(&[1, 1, 2, b'a']), "base longer than the path");
    // p/a, then q/b with base "p/a"[..1]: shares 2 bytes, of which its base has 1.
    assert!(
        refused(&[2, 2, 3, 1, 2, 1, b'p', b'/', b'a', b'b']),
        "shares past a base path"
    );
    assert!(!refused(&[2, 2, 3, 1, 2, 2, b'p', b'/', b'a', b'b']));
    assert!(refused(&[1, 2, 0, b'a']), "cut short");
    assert!(refused(&[1, 1, 0, b'a', b'b']), "goes on");
}

#[test]
fn paths_that_unpack_beyond_the_limit_are_refused() {
    // 1,000 paths of 1,001 bytes and more in 4 KB.
    let mut bytes = Vec::new();
    put_varint(&mut bytes, 1000);
    for _ in 1..1000 {
        put_varint(&mut bytes, 1000);
    }
    put_varint(&mut bytes, 1001);
    bytes.extend([1; 999]);
    bytes.extend([0; 1000]);
    bytes.extend([b'a'; 2000]);
    assert!(matches!(decode(&bytes, ""), Ok(files) if files.len() == 1000));
    let shared = bytes::Bytes::from(bytes);
    let refused = FileTable::decode(&mut Cursor::new(&shared), "", 500_000);
    assert!(matches!(refused, Err(Error::TooLarge { .. })));
    // The longest path, and one longer by the transitive path.
    let long = [&[1, 0xff, 0xff, 3, 0][..], &[b'a'; 65535]].concat();
    assert!(decode(&long, "").is_ok());
    assert!(matches!(decode(&long, "p"), Err(Error::TooLarge { .. })));
}

proptest! {
    #[test]
    fn tables_round_trip(
        parts in prop::collection::btree_set(("(|p/|pq/|p/q/|é/)", "[a-cé]{1,3}(/[ab]{1,2})?"), 0..12),
    ) {
        let mut files: Vec<_> = parts.iter().map(|(base, name)| file(base, name)).collect();
        files.sort();
        files.dedup();
        let read = decode(&encode(&files), "").unwrap();
        let read: Vec<_> = read.iter().map(|file| DataFile::clone(file)).collect();
        prop_assert_eq!(read, files);
    }
}
