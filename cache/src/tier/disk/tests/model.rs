//! Two processes' worth of stores against a model, with damage in between.

use std::collections::HashMap;

use proptest::prelude::*;

use super::*;

const NUMBERS: u32 = 12;

#[derive(Debug, Clone)]
enum Step {
    Put(usize, u32),
    Get(usize, u32),
    Tend(usize),
    Reopen(usize),
    /// Cuts the file of a number to this share of it, in 256ths.
    Cut(u32, u8),
    /// Changes the byte at this share of it.
    Flip(u32, u8),
    /// Deletes the file, as a user may.
    Delete(u32),
    /// Removes the index, as a user may, whoever has it.
    Forget,
}

fn step() -> impl Strategy<Value = Step> {
    let (who, number) = (0..2usize, 0..NUMBERS);
    prop_oneof![
        6 => (who.clone(), number.clone()).prop_map(|(who, n)| Step::Put(who, n)),
        6 => (who.clone(), number.clone()).prop_map(|(who, n)| Step::Get(who, n)),
        1 => who.clone().prop_map(Step::Tend),
        1 => who.prop_map(Step::Reopen),
        1 => (number.clone(), any::<u8>()).prop_map(|(n, at)| Step::Cut(n, at)),
        1 => (number.clone(), any::<u8>()).prop_map(|(n, at)| Step::Flip(n, at)),
        1 => number.prop_map(Step::Delete),
        1 => Just(Step::Forget),
    ]
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    Good,
    Bad,
}

/// Runs the steps. Where all entries fit, the store must have exactly what the model has; where they do not, it may have
/// less, and must be within its limit.
fn check(limit: u64, steps: &[Step]) {
    let temp = tempfile::tempdir().unwrap();
    let folder = temp.path();
    let all: u64 = (0..NUMBERS).map(blocks).sum();
    let mut stores = [Subject::new(folder, limit), Subject::new(folder, limit)];
    let mut model: HashMap<u32, State> = HashMap::new();
    // Damage may undo damage.
    let mut sound: HashMap<u32, Vec<u8>> = HashMap::new();
    for step in steps {
        match *step {
            Step::Put(who, number) => {
                let put = stores[who].put(number);
                let known = model.insert(number, State::Good);
                match put {
                    Put::Created => {}
                    Put::Present => assert_eq!(known, Some(State::Good)),
                    Put::NoRoom => panic!("each fits by itself"),
                }
                sound.insert(number, std::fs::read(path(folder, number)).unwrap());
            }
            Step::Get(who, number) => {
                let found = stores[who].has(number);
                let known = model.get(&number).copied();
                if found {
                    assert_eq!(known, Some(State::Good));
                } else {
                    assert!(
                        known != Some(State::Good) || all > limit,
                        "{number} is lost"
                    );
                    model.remove(&number);
                }
            }
            Step::Tend(who) => stores[who].store.tend().unwrap(),
            Step::Reopen(who) => stores[who] = Subject::new(folder, limit),
            Step::Cut(number, at) => damage(folder, number, &mut model, &sound, |object| {
                object.truncate(object.len() * usize::from(at) / 256);
            }),
            Step::Flip(number, at) => damage(folder, number, &mut model, &sound, |object| {
                let at = object.len() * usize::from(at) / 256;
                object[at] ^= 0x10;
            }),
            Step::Delete(number) => {
                let _ = std::fs::remove_file(path(folder, number));
                model.remove(&number);
            }
            Step::Forget => {
                let _ = std::fs::remove_dir_all(folder.join("index"));
            }
        }
        assert!(written(folder) <= limit, "{} of {limit}", written(folder));
        assert!(
            !files(folder)
                .iter()
                .any(|(name, _)| name.starts_with(".tmp-"))
        );
    }
    // What the stores have counted is what is there.
    for subject in &stores {
        if folder.exists() && !files(folder).is_empty() {
            subject.store.tend().unwrap();
            assert_eq!(subject.counts().disk_bytes, census(folder).bytes());
        }
    }
}

fn damage(
    folder: &Path,
    number: u32,
    model: &mut HashMap<u32, State>,
    sound: &HashMap<u32, Vec<u8>>,
    change: impl FnOnce(&mut Vec<u8>),
) {
    let path = path(folder, number);
    let Ok(mut object) = std::fs::read(&path) else {
        return;
    };
    if object.is_empty() {
        return;
    }
    change(&mut object);
    std::fs::write(&path, &object).unwrap();
    let state = match sound.get(&number) == Some(&object) {
        true => State::Good,
        false => State::Bad,
    };
    model.insert(number, state);
}

#[test]
fn a_file_that_is_mended_is_found() {
    use Step::{Flip, Get, Put};
    check(
        1 << 20,
        &[Put(0, 1), Flip(1, 9), Flip(1, 9), Get(0, 1), Get(1, 1)],
    );
}

proptest! {
    #![proptest_config(ProptestConfig {
        // Each runs on a real disk; `make soak` sets PROPTEST_CASES for tests that do not.
        cases: if soak() { 500 } else { 24 },
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn with_room_for_all_the_store_is_the_model(steps in prop::collection::vec(step(), 1..60)) {
        check(1 << 20, &steps);
    }

    #[test]
    fn with_little_room_it_is_within_its_limit_and_never_wrong(steps in prop::collection::vec(step(), 1..60)) {
        check(12 * 4096, &steps);
    }
}
