//! Engines of several processes in one, with messages in an order made by chance.

mod failures;
mod gather;
mod movement;

use crate::call::{Call, Failure};
use crate::engine::{Engine, Launch};
use crate::op::Op;
use crate::transport::{Message, Process, Transport};
use bytes::Bytes;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};

/// Numbers that look random and are the same in each run.
pub(crate) struct Chance(u64);

impl Chance {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub(crate) fn below(&mut self, end: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 >> 33).expect("31 bits") % end
    }

    pub(crate) fn bytes(&mut self, count: usize) -> Vec<u8> {
        (0..count)
            .map(|_| u8::try_from(self.below(256)).expect("a byte"))
            .collect()
    }
}

type Queue = Arc<Mutex<VecDeque<(Process, Process, Message)>>>;

struct Way {
    from: Process,
    queue: Queue,
}

impl Transport for Way {
    fn send(&self, to: Process, message: Message) -> Result<(), Failure> {
        assert_ne!(self.from, to, "nobody writes to itself");
        self.queue
            .lock()
            .expect("no panic")
            .push_back((self.from, to, message));
        Ok(())
    }
}

/// Some processes.
struct World {
    engines: Vec<Engine>,
    queue: Queue,
    chance: Chance,
    /// Processes that hear and say nothing.
    cut: Vec<Process>,
    most: usize,
}

impl World {
    fn new(processes: u32, seed: u64) -> Self {
        let queue = Queue::default();
        let engines = (0..processes)
            .map(|process| {
                let from = Process(process);
                let queue = Arc::clone(&queue);
                Engine::new(from, Arc::new(Way { from, queue }))
            })
            .collect();
        Self {
            engines,
            queue,
            chance: Chance::new(seed),
            cut: Vec::new(),
            most: 0,
        }
    }

    /// Opens a launch on all processes; `placement` says the process of each partition.
    fn open(&self, number: u64, placement: &[u32]) -> Vec<Option<Launch>> {
        let all: Arc<[Process]> = placement.iter().map(|process| Process(*process)).collect();
        self.engines
            .iter()
            .map(|engine| {
                all.contains(&engine.process())
                    .then(|| engine.open(number, Arc::clone(&all)).expect("it opens"))
            })
            .collect()
    }

    /// Hands over one message, any. False if there is none.
    fn step(&mut self) -> bool {
        let next = {
            let mut queue = self.queue.lock().expect("no panic");
            self.most = self.most.max(queue.len());
            if queue.is_empty() {
                return false;
            }
            let index = self.chance.below(queue.len());
            queue.swap_remove_back(index).expect("it is there")
        };
        let (from, to, message) = next;
        if !self.cut.contains(&from) && !self.cut.contains(&to) {
            self.engines[usize::try_from(to.0).expect("few")].receive(from, message);
        }
        true
    }

    fn run(&mut self) {
        while self.step() {}
    }
}

/// What became of a call.
#[derive(Clone, Default)]
struct Outcome {
    ended: Arc<Mutex<Option<Result<(), Failure>>>>,
    results: Arc<Mutex<Vec<Vec<u8>>>>,
    /// Operands that are not let go of.
    inputs: Arc<AtomicUsize>,
}

impl Outcome {
    fn get(&self) -> Option<Result<(), Failure>> {
        self.ended.lock().expect("no panic").clone()
    }

    fn results(&self) -> Vec<Vec<u8>> {
        assert_eq!(self.get(), Some(Ok(())));
        self.results.lock().expect("no panic").clone()
    }
}

/// An operand that is counted.
struct Counted(Vec<u8>, Arc<AtomicUsize>);

impl AsRef<[u8]> for Counted {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.1.fetch_sub(1, SeqCst);
    }
}

/// Results that are looked at when they are let go of.
struct Kept(Vec<Vec<u8>>, Outcome);

impl crate::call::Outputs for Kept {
    fn count(&self) -> usize {
        self.0.len()
    }

    fn get(&mut self, index: usize) -> &mut [u8] {
        self.0.get_mut(index).map_or(&mut [], Vec::as_mut_slice)
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        *self.1.results.lock().expect("no panic") = std::mem::take(&mut self.0);
    }
}

/// Starts a collective for one partition.
fn start(launch: &Launch, partition: u32, op: &Op, inputs: &[Vec<u8>]) -> Outcome {
    let outcome = Outcome::default();
    outcome.inputs.store(inputs.len(), SeqCst);
    let results = op
        .results
        .iter()
        // What was there before must not be seen.
        .map(|bytes| vec![0xee; usize::try_from(*bytes).expect("small")])
        .collect();
    let inputs = inputs
        .iter()
        .map(|input| Bytes::from_owner(Counted(input.clone(), Arc::clone(&outcome.inputs))))
        .collect();
    let ended = outcome.clone();
    let once = AtomicBool::new(false);
    let call = Call {
        inputs,
        outputs: Box::new(Kept(results, outcome.clone())),
        done: Box::new(move |how| {
            assert!(!once.swap(true, SeqCst));
            *ended.ended.lock().expect("no panic") = Some(how);
        }),
    };
    launch
        .member(partition)
        .expect("it runs here")
        .start(op, call);
    outcome
}
