//! Pieces whose bytes count against the budget.

use std::sync::Arc;

use bytes::Bytes;
use waystation_checkpoint::{Config, Elements, Engine, IndexDomain, zarr::Format};

use crate::support::{Array, ITEM, boxes, domain, engine, to_restore, to_save};

/// In parts of odd sizes.
fn in_parts(bytes: &Bytes) -> Elements {
    (0..bytes.len())
        .step_by(7)
        .map(|at| bytes.slice(at..bytes.len().min(at + 7)))
        .collect()
}

#[tokio::test]
async fn pieces_in_parts_are_the_same_objects() {
    let folder = tempfile::tempdir().unwrap();
    let location = folder.path().to_str().unwrap();
    for (number, (dims, chunks)) in [
        (&[8i64, 6][..], &[4i64, 6][..]),
        // Padded at both edges; several chunks a piece, some of them no run of bytes.
        (&[7, 5], &[4, 3]),
        (&[], &[]),
        (&[6, 4, 2], &[1, 2, 2]),
    ]
    .into_iter()
    .enumerate()
    {
        let array = Array::new(dims);
        for format in [Format::Zarr2, Format::Zarr3] {
            let engine = Engine::new(Config {
                format: format.into(),
                // Less than one piece.
                host_memory_bytes: 4096,
                ..Config::default()
            });
            let name = |way: &str| format!("{way}{number}{format:?}");
            let (whole, held) = (name("whole"), name("held"));
            let to_save = |name: &str| to_save(location, name, dims, chunks);
            let pieces = array.pieces(&boxes(dims, chunks));
            engine
                .save(&to_save(&whole), pieces.clone(), true)
                .await
                .unwrap();
            engine.save(&to_save(&held), vec![], true).await.unwrap();
            for (piece, bytes) in pieces {
                let room = engine.room_for_piece(bytes.len()).await;
                let array = to_save(&held);
                let written = engine.save_held(&array, &piece, in_parts(&bytes), Arc::new(room));
                assert!(written.await.unwrap() > 0);
            }
            assert_eq!(engine.totals().host_memory_bytes, 0, "all given back");
            for way in [&whole, &held] {
                let asked = to_restore(location, way, dims);
                let found = engine.restore(&asked, &[IndexDomain::whole(dims)]).await;
                assert_eq!(found.unwrap()[0], array.part(&IndexDomain::whole(dims)));
            }
        }
    }
}

#[tokio::test]
async fn cuts_of_a_piece_are_written_one_by_one() {
    let folder = tempfile::tempdir().unwrap();
    let location = folder.path().to_str().unwrap();
    let dims = [9, 4];
    let (array, engine) = (Array::new(&dims), engine());
    let save = to_save(location, "w", &dims, &[2, 4]);
    let whole = IndexDomain::whole(&dims);
    let (bytes, cuts) = (array.part(&whole), save.cut(&whole).unwrap());
    assert_eq!(cuts.len(), 5);
    engine.save(&save, vec![], true).await.unwrap();
    for cut in cuts {
        let part = bytes.slice(cut.bytes);
        let room = engine.room_for_piece(part.len()).await;
        engine
            .save_held(&save, &cut.domain, part.into(), Arc::new(room))
            .await
            .unwrap();
    }
    let asked = to_restore(location, "w", &dims);
    let found = engine.restore(&asked, &[whole]).await;
    assert_eq!(found.unwrap()[0], bytes);
    let totals = engine.totals();
    assert_eq!((totals.writes, totals.reads), (6, 6));
    assert!(totals.read_bytes == totals.written_bytes && totals.read_bytes > 0);
}

#[tokio::test]
async fn pieces_that_do_not_fit_are_refused() {
    let engine = engine();
    let save = to_save("/nowhere", "w", &[8], &[4]);
    for (origin, shape, bytes) in [(0, 4, 3 * ITEM), (2, 4, 4 * ITEM), (8, 4, 4 * ITEM)] {
        let room = engine.room_for_piece(1).await;
        let elements = Bytes::from(vec![0; bytes]).into();
        let piece = domain(&[origin], &[shape]);
        let refused = engine
            .save_held(&save, &piece, elements, Arc::new(room))
            .await;
        assert!(refused.is_err());
    }
}
