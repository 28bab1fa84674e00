//! What workers write, before Orbax has finished the save: the arrays are whole.

#![allow(
    clippy::unwrap_used,
    reason = "a helper that fails fails its test; clippy knows that only of test functions"
)]

use waystation_checkpoint::{Config, Engine, IndexDomain, Layout, SaveArray};
use waystation_checkpoint_tools::verify::{self, Kind};
use waystation_checkpoint_tools::{Item, Memory, Place, Progress};
use waystation_proto::xla::PrimitiveType;

#[tokio::test]
async fn scalars_and_arrays_without_elements_are_whole_in_every_layout() {
    for layout in Layout::ALL {
        let folder = tempfile::tempdir().unwrap();
        let location = folder.path().to_str().unwrap();
        let engine = Engine::new(Config {
            format: layout,
            ..Config::default()
        });
        let saving = engine.saving();
        for (name, dims) in [
            ("step", &[][..]),
            ("empty", &[0, 4]),
            ("also.empty", &[0]),
            ("w", &[2, 2]),
        ] {
            let array = SaveArray {
                location: location.to_owned(),
                name: name.to_owned(),
                dtype: PrimitiveType::U8,
                dims: dims.to_vec(),
                chunks: dims.to_vec(),
                codec: None,
            };
            let whole = IndexDomain::whole(dims);
            let elements = vec![7; whole.num_elements().unwrap()];
            let saved = saving.save(&array, vec![(whole, elements.into())], true);
            saved.await.unwrap();
        }
        saving.finish().await.unwrap();
        engine.merge_children(location).await.unwrap();
        let item = Item::open(&Place::open(location).await.unwrap())
            .await
            .unwrap();
        let (memory, progress) = (Memory::default(), Progress::default());
        let report = verify::verify(&item, &memory, &progress);
        let report = report.await.unwrap();
        assert_eq!((report.arrays, report.chunks), (4, 2), "{layout}");
        let faults: Vec<_> = report
            .faults
            .iter()
            // Which Orbax itself writes.
            .filter(|fault| !(fault.kind == Kind::Unreadable && fault.object == "_METADATA"))
            .collect();
        assert!(faults.is_empty(), "{layout}: {faults:?}");
    }
}
