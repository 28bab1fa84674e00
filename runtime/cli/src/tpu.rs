//! What a worker on TPUs sets in its environment for libtpu, before that is loaded: what the resource manager says of its slice
//! and of the others, where the environment does not say it already. Not tried on hardware.

use std::net::{IpAddr, SocketAddr};

use waystation_proto::{
    BUILD_ID, LINK_VERSION,
    waystation::scheduler::{IntroduceReply, IntroduceRequest},
};
use waystation_scheduler::{MEGASCALE_COORDINATOR, TPU_VARIABLES};

use crate::{anew::Change, ask, error::Failure, listen};

/// Asks the resource manager at `manager` until it knows all the hosts that are needed; none when the process was told to end
/// meanwhile. Must not be called within a runtime.
///
/// # Errors
/// When the resource manager refuses the worker for good, or when there is no runtime to be had.
pub(crate) fn changes(
    manager: &str,
    slice: u32,
    task: u32,
    bind_address: IpAddr,
    parent_stdin: bool,
) -> Result<Option<Vec<Change>>, Failure> {
    let variable = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
    let jobset = variable("JOBSET_NAME").zip(variable("REPLICATED_JOB_NAME"));
    let address = listen::reachable(SocketAddr::new(bind_address, 0), manager);
    let (jobset, replicated_job) = jobset.unwrap_or_default();
    let request = IntroduceRequest {
        link_version: LINK_VERSION,
        build_id: BUILD_ID.to_owned(),
        slice,
        task,
        host: match jobset.as_str() {
            "" => host(address),
            // As a JobSet names its pods.
            jobset => format!("{jobset}-{replicated_job}-{slice}-{task}.{jobset}"),
        },
        jobset,
        replicated_job,
        waits: false,
    };
    let given = |name: &str| given(variable(name), name, head(manager));
    let answer = ask::introduce(manager, request, parent_stdin, |reply| {
        let lacking = lacking(reply, given);
        (!lacking.is_empty()).then(|| {
            format!(
                "{} to introduce itself, for {}, which the environment may give as well",
                reply.waiting_for,
                lacking.join(", ")
            )
        })
    })?;
    Ok(answer.map(|reply| missing(reply, given)))
}

/// The address without its port, an IPv6 one in brackets.
fn host(address: SocketAddr) -> String {
    match address {
        SocketAddr::V4(address) => address.ip().to_string(),
        SocketAddr::V6(address) => format!("[{}]", address.ip()),
    }
}

/// The host of the resource manager.
fn head(manager: &str) -> &str {
    manager.rsplit_once(':').map_or(manager, |(host, _)| host)
}

/// What the environment says that stays. An empty value says nothing, nor does a coordinator of Megascale that is `head`:
/// Pathways' JobSets name that, where Pathways' own resource manager is one; ours is not.
fn given(value: Option<String>, name: &str, head: &str) -> Option<String> {
    value.filter(|value| !value.is_empty() && (name != MEGASCALE_COORDINATOR || value != head))
}

/// The variables that are lacking and not given either.
fn lacking(reply: &IntroduceReply, given: impl Fn(&str) -> Option<String>) -> Vec<&str> {
    let lacking = reply.lacking.iter().map(String::as_str);
    lacking.filter(|name| given(name).is_none()).collect()
}

/// What is to be set: what is not given.
fn missing(reply: IntroduceReply, given: impl Fn(&str) -> Option<String>) -> Vec<Change> {
    // Others than these are not for the resource manager to set.
    let known = |name: &str| TPU_VARIABLES.into_iter().find(|known| *known == name);
    let variables = reply.variables.into_iter();
    let changes = variables.filter_map(|variable| {
        let name = known(&variable.name)?;
        let is_given = given(name).is_some();
        (!is_given).then(|| (name, Some(variable.value.into())))
    });
    changes.collect()
}

#[cfg(test)]
mod tests {
    use waystation_proto::waystation::scheduler::introduce_reply::Variable;

    use super::*;

    fn reply(variables: &[(&str, &str)], lacking: &[&str]) -> IntroduceReply {
        let variable = |(name, value): &(&str, &str)| Variable {
            name: (*name).to_owned(),
            value: (*value).to_owned(),
        };
        IntroduceReply {
            variables: variables.iter().map(variable).collect(),
            lacking: lacking.iter().map(|name| (*name).to_owned()).collect(),
            waiting_for: String::new(),
        }
    }

    /// That of a worker whose resource manager is "train-head".
    fn environment(variables: &[(&str, &str)]) -> impl Fn(&str) -> Option<String> {
        let variable = |name: &str| {
            let mut variables = variables.iter();
            let found = variables.find(|(known, _)| *known == name);
            found.map(|(_, value)| (*value).to_owned())
        };
        move |name| given(variable(name), name, head("train-head:29001"))
    }

    fn changed(given: &[(&str, &str)]) -> Vec<String> {
        let all = [
            ("TPU_WORKER_ID", "1"),
            ("MEGASCALE_NUM_SLICES", "2"),
            ("MEGASCALE_COORDINATOR_ADDRESS", "first"),
            ("LD_PRELOAD", "evil"),
        ];
        let changes = missing(reply(&all, &[]), environment(given));
        let text = |(name, value): Change| {
            let value = value.expect("set").into_string().expect("text");
            format!("{name}={value}")
        };
        changes.into_iter().map(text).collect()
    }

    #[test]
    fn what_the_environment_says_stays_but_for_the_head_as_coordinator() {
        let coordinator = "MEGASCALE_COORDINATOR_ADDRESS";
        let own = format!("{coordinator}=first");
        let all = ["TPU_WORKER_ID=1", "MEGASCALE_NUM_SLICES=2", &own];
        assert_eq!(changed(&[]), all);
        assert_eq!(
            changed(&[("MEGASCALE_NUM_SLICES", "3")]),
            ["TPU_WORKER_ID=1", &own]
        );
        assert_eq!(changed(&[("MEGASCALE_NUM_SLICES", "")]), all);
        assert_eq!(changed(&[(coordinator, "train-head")]), all);
        assert_eq!(changed(&[(coordinator, "another")]), all[..2]);
        assert_eq!(changed(&[(coordinator, "first")]), all[..2]);
    }

    #[test]
    fn only_what_the_environment_lacks_too_is_waited_for() {
        let reply = reply(&[], &["TPU_WORKER_HOSTNAMES"]);
        assert_eq!(lacking(&reply, |_| None), ["TPU_WORKER_HOSTNAMES"]);
        let given = |name: &str| (name == "TPU_WORKER_HOSTNAMES").then(|| "a,b".to_owned());
        assert!(lacking(&reply, given).is_empty());
        let empty = environment(&[("TPU_WORKER_HOSTNAMES", "")]);
        assert_eq!(lacking(&reply, empty).len(), 1);
    }

    #[test]
    fn the_coordinator_that_replaces_the_head_is_waited_for() {
        let coordinator = "MEGASCALE_COORDINATOR_ADDRESS";
        let reply = reply(&[], &[coordinator]);
        let of = |given| lacking(&reply, environment(&[(coordinator, given)]));
        assert_eq!(of("train-head"), [coordinator]);
        assert!(of("another").is_empty());
    }

    #[test]
    fn hosts_have_no_port() {
        assert_eq!(host("10.0.0.7:80".parse().unwrap()), "10.0.0.7");
        assert_eq!(host("[fe80::1]:80".parse().unwrap()), "[fe80::1]");
    }
}
