//! What a run has sent and what came back.

use std::{collections::BTreeMap, fmt};

/// Counts of one kind of request.
#[derive(Clone, Debug, Default)]
struct Kind {
    decoded: u64,
    undecodable: u64,
    /// By status code; 0 is OK.
    codes: BTreeMap<i32, u64>,
    /// Open when the session ended, or ended with it.
    unanswered: u64,
}

/// See the module.
#[derive(Clone, Debug)]
pub struct Report {
    /// Of the run.
    pub seed: u64,
    /// Sessions opened.
    pub sessions: u64,
    /// Requests that could not be made, because the session had lost what they need.
    pub unmade: u64,
    /// Requests that decode as another kind, or as none.
    pub other_kind: u64,
    kinds: BTreeMap<&'static str, Kind>,
    calls: BTreeMap<(&'static str, i32), u64>,
}

impl Report {
    /// An empty one.
    pub fn new(seed: u64) -> Self {
        Self {
            seed,
            sessions: 0,
            unmade: 0,
            other_kind: 0,
            kinds: BTreeMap::new(),
            calls: BTreeMap::new(),
        }
    }

    pub(super) fn decoded(&mut self, kind: &'static str, same: bool) {
        self.kinds.entry(kind).or_default().decoded += 1;
        self.other_kind += u64::from(!same);
    }

    pub(super) fn undecodable(&mut self, kind: &'static str) {
        self.kinds.entry(kind).or_default().undecodable += 1;
    }

    /// Codes by kind; `None` where no answer came.
    pub(super) fn answers(&mut self, answers: Vec<(&'static str, Option<i32>)>) {
        for (kind, code) in answers {
            let kind = self.kinds.entry(kind).or_default();
            match code {
                Some(code) => *kind.codes.entry(code).or_default() += 1,
                None => kind.unanswered += 1,
            }
        }
    }

    pub(super) fn call(&mut self, call: (&'static str, i32)) {
        *self.calls.entry(call).or_default() += 1;
    }

    /// Requests sent.
    pub fn sent(&self) -> u64 {
        self.kinds.values().map(|k| k.decoded + k.undecodable).sum()
    }

    /// Requests that decoded.
    pub fn decoded_total(&self) -> u64 {
        self.kinds.values().map(|k| k.decoded).sum()
    }

    /// Answers with one status code, of requests and of calls.
    pub fn with_code(&self, code: i32) -> u64 {
        let requests: u64 = self.kinds.values().filter_map(|k| k.codes.get(&code)).sum();
        let calls: u64 = self
            .calls
            .iter()
            .filter(|((_, c), _)| *c == code)
            .map(|(_, count)| count)
            .sum();
        requests + calls
    }

    /// How often a call outside the stream had this code.
    pub fn called(&self, call: &'static str, code: i32) -> u64 {
        self.calls.get(&(call, code)).copied().unwrap_or_default()
    }

    /// The kinds that were sent and decoded, and their variants.
    pub fn kinds(&self) -> Vec<&'static str> {
        self.kinds
            .iter()
            .filter(|(_, kind)| kind.decoded > 0)
            .map(|(name, _)| *name)
            .collect()
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (sent, decoded) = (self.sent(), self.decoded_total());
        writeln!(
            f,
            "seed {}: {sent} requests in {} sessions, {decoded} decoded ({} %), {} of them as another kind; {} not made",
            self.seed,
            self.sessions,
            decoded * 100 / sent.max(1),
            self.other_kind,
            self.unmade,
        )?;
        writeln!(
            f,
            "{:52} {:>8} {:>8} {:>8}  answers by code",
            "kind", "decoded", "damaged", "open"
        )?;
        for (name, kind) in &self.kinds {
            write!(
                f,
                "{name:52} {:>8} {:>8} {:>8} ",
                kind.decoded, kind.undecodable, kind.unanswered
            )?;
            for (code, count) in &kind.codes {
                write!(f, " {}:{count}", code_name(*code))?;
            }
            writeln!(f)?;
        }
        for ((call, code), count) in &self.calls {
            writeln!(f, "{call:52} {count:>8} {}", code_name(*code))?;
        }
        Ok(())
    }
}

fn code_name(code: i32) -> String {
    match code {
        0 => "OK".to_owned(),
        -1 => "no answer: the session ended".to_owned(),
        code => format!("{:?}", tonic::Code::from_i32(code)),
    }
}
