//! Requests that are wrong in a place or two, by the thousand, against a running server.
//!
//! A [`Scene`] is a session with arrays, programs and futures in it, and makes a good request of every kind of the
//! protocol. The run changes most of them (numbers, handles, nested serialized messages, whole fields, single bytes),
//! sends them and counts what came back. A [`Witness`] works on in another session meanwhile and checks its results.

pub mod folders;
pub mod mutate;
pub mod random;
pub mod report;
pub mod scene;
pub mod wire;
pub mod witness;

use std::time::Duration;

use bytes::Bytes;
use futures::FutureExt as _;
use prost::Message as _;
use tokio::task::JoinSet;
use waystation_client::{Error, Pending};
use waystation_proto::xla::ifrt::proxy::{IfrtRequest, RequestMetadata};

pub use self::{folders::Folders, report::Report, scene::Scene, witness::Witness};
use self::{
    random::Random,
    scene::{COMPILE, KINDS},
};

/// Requests of one session, before the next one starts afresh.
const SESSION_REQUESTS: usize = 64;
/// How often other changes are looked for when the changed bytes do not decode.
const DECODABLE_TRIES: usize = 8;
/// How long the answers of a session are waited for that come late or never. What waits for bytes nobody stores is
/// answered by the session's end alone.
const LAST_ANSWERS: Duration = Duration::from_millis(500);

/// How long a call outside the stream may take; the longest waits for files, within a few seconds.
const CALL_ANSWER: Duration = Duration::from_secs(60);

/// Sessions that may wait for their last answers while another one goes on.
const SESSIONS_ENDING: usize = 4;

/// What to send.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    /// The run follows from it.
    pub seed: u64,
    /// How many requests.
    pub requests: usize,
    /// Whether programs and compile options are damaged as well.
    pub programs: bool,
}

impl Plan {
    /// The plan of a test: `requests`, or what `WAYSTATION_FUZZ_REQUESTS` says; the seed from `WAYSTATION_FUZZ_SEED`, or 1.
    /// `WAYSTATION_FUZZ_PROGRAMS=0` leaves programs whole.
    pub fn from_environment(requests: usize) -> Self {
        let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse().ok());
        Self {
            seed: number("WAYSTATION_FUZZ_SEED").unwrap_or(1),
            requests: number("WAYSTATION_FUZZ_REQUESTS")
                .and_then(|n| usize::try_from(n).ok())
                .unwrap_or(requests),
            programs: number("WAYSTATION_FUZZ_PROGRAMS") != Some(0),
        }
    }
}

/// Sends the plan's requests to the server at `host:port`, which takes large transfers from the folder for them.
///
/// # Errors
/// When the server does not take a new session or no longer answers good requests at a session's start.
pub async fn run(address: &str, folders: &Folders, plan: Plan) -> Result<Report, Error> {
    let mut random = Random::new(plan.seed);
    let mut report = Report::new(plan.seed);
    let mut sent = 0;
    let mut ending = JoinSet::new();
    while sent < plan.requests {
        let mut scene = Scene::open(address, folders).await?;
        report.sessions += 1;
        let mut waiting = Vec::new();
        for _ in 0..SESSION_REQUESTS.min(plan.requests - sent) {
            sent += 1;
            let kind = if plan.programs && random.one_in(4) {
                COMPILE
            } else {
                random.below(KINDS)
            };
            let Ok(seed) = scene.request(kind, &mut random).await else {
                // The session has lost what this kind needs: handles that a wrong request has ended.
                report.unmade += 1;
                continue;
            };
            let (name, label) = (scene::name(&seed), scene.label(&seed));
            let op_id = scene.client.op_id();
            let message = IfrtRequest {
                request_metadata: Some(RequestMetadata {
                    op_id,
                    user_context_id: random.any() >> random.below(64),
                }),
                request: Some(seed),
            };
            let mut bytes = change(&message, &mut scene, plan, &mut random);
            // Bytes that do not decode end the session, so most of them give way to others.
            for _ in 0..DECODABLE_TRIES {
                if IfrtRequest::decode(bytes.clone()).is_ok() || random.one_in(8) {
                    break;
                }
                bytes = change(&message, &mut scene, plan, &mut random);
            }
            // The server decodes with the same code.
            let (decoded, op_id) = match IfrtRequest::decode(bytes.clone()) {
                Ok(message) => {
                    let same = message.request.as_ref().map(scene::name) == Some(name);
                    report.decoded(label, same);
                    let op_id = message.request_metadata.unwrap_or_default().op_id;
                    (true, op_id)
                }
                Err(_) => {
                    report.undecodable(label);
                    (false, 0)
                }
            };
            let pending = scene.client.send_encoded(op_id, bytes).await;
            if decoded {
                waiting.push((label, pending));
            }
            if random.one_in(8) {
                let call = scene.call(&mut random);
                let answer = tokio::time::timeout(CALL_ANSWER, call).await;
                report.call(answer.unwrap_or(("a call without an answer", -1)));
            }
            if !scene.client.is_open() {
                break;
            }
        }
        // The next session need not wait for what this one waits for in vain.
        while ending.len() >= SESSIONS_ENDING
            && let Some(answers) = ending.join_next().await
        {
            report.answers(answers.unwrap_or_default());
        }
        ending.spawn(collect(scene, waiting));
        if report.sessions.is_multiple_of(100) {
            eprintln!("{sent} of {} requests sent", plan.requests);
        }
    }
    while let Some(answers) = ending.join_next().await {
        report.answers(answers.unwrap_or_default());
    }
    Ok(report)
}

/// Most requests are changed as trees of fields, some as bytes, some not at all.
fn change(message: &IfrtRequest, scene: &mut Scene, plan: Plan, random: &mut Random) -> Bytes {
    let mut bytes = message.encode_to_vec();
    let compile = message
        .request
        .as_ref()
        .is_some_and(|request| scene::name(request) == "CompileRequest");
    match random.below(16) {
        0 => {}
        1 if plan.programs || !compile => mutate::damage(&mut bytes, random),
        _ => {
            let keep = if plan.programs {
                |path: &[u64]| path.first() == Some(&1)
            } else {
                |path: &[u64]| {
                    path.first() == Some(&1)
                        || path.starts_with(&[13, 1])
                        || path.starts_with(&[13, 2])
                }
            };
            if let Some(mut fields) = wire::parse(&bytes) {
                let original = fields.clone();
                mutate::mutate(&mut fields, &scene.pool, random, keep);
                scene.remember(&original, random);
                bytes = wire::encode(&fields);
            }
        }
    }
    bytes.into()
}

/// The answers of a session, which ends here; those that do not come are `None`.
async fn collect(
    scene: Scene,
    waiting: Vec<(&'static str, Pending)>,
) -> Vec<(&'static str, Option<i32>)> {
    let deadline = tokio::time::Instant::now() + LAST_ANSWERS;
    // Answered in the order of the stream: what can be answered at once has been answered before it.
    let _ = scene.client.call(scene.fence()).await;
    let mut answers = Vec::with_capacity(waiting.len());
    for (name, pending) in waiting {
        let mut answer = Box::pin(pending.wait());
        let answer = match answer.as_mut().now_or_never() {
            Some(answer) => Some(answer),
            None => tokio::time::timeout_at(deadline, answer).await.ok(),
        };
        let code = match answer {
            Some(Ok(_)) => Some(0),
            Some(Err(error)) => error.code(),
            None => None,
        };
        answers.push((name, code));
    }
    answers
}
