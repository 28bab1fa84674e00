//! Memory of the caller's that restores read and decode into.

use std::ops::Range;
use std::sync::{Arc, Mutex};

use waystation_checkpoint::zarr::{Codec, Format};
use waystation_checkpoint::{
    Buffer, Buffers, Config, Engine, IndexDomain, Layout, SaveArray, Term,
};

use crate::support::{Array, boxes, domain, to_restore, to_save};

/// Notes what it gives, which is full of what no element is.
#[derive(Debug, Default)]
struct Given(Mutex<Vec<(Range<usize>, Term)>>);

impl Buffers for Given {
    fn take(&self, len: usize, term: Term) -> Option<Box<dyn Buffer>> {
        let bytes = vec![0xa5; len];
        let start = bytes.as_ptr().addr();
        self.0.lock().unwrap().push((start..start + len, term));
        Some(Box::new(bytes))
    }
}

#[tokio::test]
async fn elements_are_where_they_are_to_stay() {
    let dims = [512, 512];
    let array = Array::new(&dims);
    let chunks = boxes(&dims, &[256, 512]);
    for format in [Format::Zarr2, Format::Zarr3] {
        for (is_ocdbt, codec) in [
            (false, Codec::Raw),
            (false, Codec::Zstd { level: 1 }),
            (true, Codec::Raw),
            (true, Codec::Zstd { level: 1 }),
        ] {
            let folder = tempfile::tempdir().unwrap();
            let location = folder.path().to_str().unwrap();
            let given = Arc::new(Given::default());
            let layout = match (is_ocdbt, format) {
                (false, format) => format.into(),
                (true, Format::Zarr2) => Layout::OcdbtZarr2,
                (true, Format::Zarr3) => Layout::OcdbtZarr3,
            };
            let engine = Engine::new(Config {
                format: layout,
                buffers: Some(Arc::clone(&given) as Arc<dyn Buffers>),
                ..Config::default()
            });
            let to_save = SaveArray {
                codec: Some(codec),
                ..to_save(location, "w", &dims, &[256, 512])
            };
            let pieces = array.pieces(&chunks);
            engine.save(&to_save, pieces, true).await.unwrap();
            let asked = to_restore(location, "w", &dims);
            let columns = [domain(&[0, 0], &[512, 200]), domain(&[0, 200], &[512, 312])];
            let whole = [IndexDomain::whole(&dims), chunks[0].clone()];
            for domains in [&chunks[..], &columns, &whole, &chunks[1..]] {
                given.0.lock().unwrap().clear();
                let found = engine.restore(&asked, domains).await.unwrap();
                let given = given.0.lock().unwrap();
                let (lasting, passing): (Vec<_>, Vec<_>) =
                    given.iter().partition(|(_, term)| *term == Term::Lasting);
                for (domain, found) in domains.iter().zip(&found) {
                    assert_eq!(*found, array.part(domain), "{layout:?} {codec:?}");
                    let place = found.as_ptr().addr();
                    assert!(
                        lasting.iter().any(|(given, _)| given.start == place),
                        "{layout:?} {codec:?} {domain:?}: not from the caller"
                    );
                }
                assert_eq!(lasting.len(), domains.len(), "and nothing else stays");
                if codec == Codec::Raw && !is_ocdbt && domains[0] == chunks[0] {
                    assert!(
                        passing.is_empty(),
                        "{layout:?}: a chunk that is a box is read there"
                    );
                }
            }
        }
    }
}
