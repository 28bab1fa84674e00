//! Programs that span CPU workers: collectives between processes, without the plugin's help.
//!
//! XLA's CPU client knows only the devices of its own process. A program over several workers is therefore compiled for
//! all its partitions at once in one process, its collectives are replaced by calls of a target of ours before code is
//! generated ([`rewrite`]), and every worker loads the one executable for its own devices. At run time the target hands
//! operands and results of each call to the [`Engine`], which moves and reduces the data among all partitions of the
//! launch, here and on other workers ([`transport`]), and says when it is done.
//!
//! Nothing here knows of PJRT: a [`Call`] is some memory to read, some to write, and somebody to tell.
//!
//! # Order and deadlock
//!
//! - XLA starts what does not depend on each other in any order, and otherwise on each device. A piece of data is
//!   therefore known by launch, operation, how often this partition has run the operation in this launch, source and
//!   target ([`Key`]), and never by when it comes.
//! - No thread waits. A call that has not all it needs is kept, and ends when the last piece has come. Handlers that
//!   blocked XLA's threads would soon block all of them.
//! - A sender has nothing on the way that the receiver has not asked for: the receiver says that it has come to the
//!   operation ([`Message::Ready`]), then the bytes go from the operand's memory into the result's. So there is no queue of early
//!   data to bound, and no piece waits behind another that nobody takes yet.
//! - Launches on one device run one after the other. All devices must get launches in one order, or two of them wait for
//!   each other; that order is the caller's part.
//! - A part of a launch that runs holds up its devices. So none is started before all processes can start theirs
//!   ([`Launch::here`]): then all that run end, whatever waits.
//!
//! # Results
//!
//! Reductions are made in the order of the group, each element by one member only or by all in the same order: bit for bit
//! the same on every member, in every run, wherever the partitions lie.
//!
//! # How a worker uses it
//!
//! 1. The child that compiles makes a client with as many devices as the program has partitions, compiles with
//!    [`rewrite`] in the plugin's hook before scheduling, and serializes. The executable depends on program, options and number
//!    of partitions, not on where they lie: one cache entry for all.
//! 2. Every worker of the program loads it for any of its devices (`compile_portable_executable`).
//! 3. The proxy numbers launches and sends each worker its part at once (*gang dispatch*); a worker takes them in the
//!    order in which they come. For each it calls [`Engine::open`] with the process of every partition, says [`Launch::here`] when
//!    its part can start, and when all have said so ([`Launch::when_all_here`]) executes once on each of its devices,
//!    on one thread a device (XLA runs cheap programs on the thread that calls), with the partition's
//!    [`Member`] as user data of the execution. When all are done, it drops the [`Launch`].
//! 4. If an execution fails to start, or fails, it calls [`Launch::fail`]. If a worker is lost, the transport or the lease
//!    says so with [`Engine::lost`].
//! 5. A worker that drains goes when [`Engine::is_idle`] says so: what its partitions have made can be on its way to others
//!    after their executions are done.

mod call;
mod engine;
mod op;
pub mod rewrite;
mod scratch;
pub mod transport;

pub use call::{Call, Code, Failure, Outputs};
pub use engine::{Engine, Launch, Member};
pub use op::{Kind, MOST_PARTITIONS, Op, Operand, Reduction, TARGET, VERSION, WrongAttribute};
pub use transport::{Key, Message, Process, Transfer, Transport};
