//! What `doctor` says of the bucket.

use std::time::Duration;

use waystation_lifecycle::bucket::{Bucket, Location, PROBE_DEADLINE};
use waystation_lifecycle::gcs::Client;
use waystation_lifecycle::policy::{self, Right};

use super::Report;
use crate::error::chain;

/// For the questions to the JSON API, each of which has its own limit.
const DEADLINE: Duration = Duration::from_secs(15);

/// One line for the bucket, and where it is one of Cloud Storage one for each right and its lifecycle rules.
pub(super) async fn look(report: &mut Report, text: &str) {
    let mistake =
        |error: &dyn std::error::Error| format!("--gcs_scratch_location: {}", chain(error));
    let location = match Location::parse(text) {
        Ok(location) => location,
        Err(error) => return report.line("!!", "bucket", &mistake(&error)),
    };
    if location.is_memory() {
        return report.line("ok", "bucket", text);
    }
    let opened = tokio::task::spawn_blocking(move || Bucket::open(&location)).await;
    let bucket = match opened {
        Ok(Ok(bucket)) => bucket,
        Ok(Err(error)) => return report.line("!!", "bucket", &mistake(&error)),
        Err(error) => return report.line("!!", "bucket", &mistake(&error)),
    };
    match bucket.probe(PROBE_DEADLINE).await {
        Ok(()) => report.line("ok", "bucket", text),
        Err(error) => report.line("!!", "bucket", &chain(&error)),
    }
    match (bucket.google(), bucket.location()) {
        (Some(client), _) => {
            if tokio::time::timeout(DEADLINE, cloud(report, client))
                .await
                .is_err()
            {
                report.line("!!", "rights", "Cloud Storage does not answer in time");
            }
        }
        (None, Location::S3 { .. }) => report.line(
            "--",
            "lifecycle",
            "not supported for s3://: set rules on the bucket yourself (docs/lifecycle.md)",
        ),
        (None, _) => report.line(
            "--",
            "lifecycle",
            "the resource manager removes what is older than --cache_ttl",
        ),
    }
}

async fn cloud(report: &mut Report, client: &Client) {
    match policy::rights(client).await {
        Ok(rights) => rights
            .iter()
            .for_each(|(right, has)| told(report, right, *has)),
        Err(error) => report.line("!!", "rights", &chain(&error)),
    }
    match policy::present(client).await {
        Ok(rules) if rules.is_empty() => report.line(
            "--",
            "lifecycle",
            "the bucket has no rule for this location; a resource manager that may adds one",
        ),
        Ok(rules) => rules
            .iter()
            .for_each(|rule| report.line("ok", "lifecycle", rule)),
        Err(error) => report.line("--", "lifecycle", &chain(&error)),
    }
}

/// Without what is needed for objects the cache does not do what it is for; the rest is a matter of choice.
fn told(report: &mut Report, right: &Right, has: bool) {
    let needed = !right.optional && right.name.starts_with("storage.objects.");
    match (has, needed) {
        (true, _) => report.line("ok", right.name, "granted"),
        (false, true) => report.line("!!", right.name, &format!("not granted: {}", right.lack)),
        (false, false) => report.line("--", right.name, &format!("not granted: {}", right.lack)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_right_that_is_missing_is_named_with_what_is_off() {
        for right in policy::RIGHTS {
            let mut report = Report::default();
            told(&mut report, &right, true);
            assert_eq!(report.text, format!("ok {}: granted\n", right.name));
            let mut report = Report::default();
            told(&mut report, &right, false);
            assert!(report.text.contains(right.lack), "{}", report.text);
            let grave = [
                "storage.objects.get",
                "storage.objects.list",
                "storage.objects.create",
            ];
            assert_eq!(report.bad, grave.contains(&right.name), "{}", right.name);
        }
    }
}
