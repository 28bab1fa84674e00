//! Lifecycle rules: what the documents allow, and when a rule strikes an object.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};

use chrono::TimeDelta;
use serde_json::value::RawValue;
use serde_json::{Map, Value};

use crate::clock::{self, Time};
use crate::object::Object;

/// As many rules as a bucket may have.
const RULES: usize = 100;

/// As many prefixes and suffixes as one rule may have.
const AFFIXES: usize = 50;

/// A rule acts up to a day after its time has come.
const LATE_SECONDS: u64 = 24 * 3600;

/// The deleting rules of a bucket; nothing else changes what the double serves.
#[derive(Debug, Default)]
pub(crate) struct Rules {
    deleting: Vec<Map<String, Value>>,
}

impl Rules {
    /// Validates the `lifecycle` member of a bucket. A rule that stands in `known` byte for byte is taken as it is: it may
    /// be of a newer day than the double.
    pub(crate) fn read(lifecycle: &str, known: &str) -> Result<Rules, String> {
        let raw: Raw<'_> = serde_json::from_str(lifecycle).map_err(|error| error.to_string())?;
        let known: Raw<'_> = serde_json::from_str(known).unwrap_or_default();
        if raw.rule.len() > RULES {
            return Err(format!("A bucket may have {RULES} lifecycle rules."));
        }
        for rule in &raw.rule {
            if !known.rule.iter().any(|known| known.get() == rule.get()) {
                check(rule.get())?;
            }
        }
        Ok(Rules::seed(lifecycle))
    }

    /// Without validation.
    pub(crate) fn seed(lifecycle: &str) -> Rules {
        let raw: Raw<'_> = serde_json::from_str(lifecycle).unwrap_or_default();
        let rules = raw
            .rule
            .iter()
            .filter_map(|rule| serde_json::from_str(rule.get()).ok());
        let deleting = rules.filter(|rule: &Value| rule["action"]["type"] == "Delete");
        let conditions = deleting.filter_map(|rule| rule["condition"].as_object().cloned());
        Rules {
            deleting: conditions.collect(),
        }
    }

    /// Whether a rule has deleted this object by now.
    pub(crate) fn has_struck(&self, name: &str, object: &Object, now: Time) -> bool {
        let due = self
            .deleting
            .iter()
            .filter_map(|condition| due(condition, name, object))
            .min();
        due.is_some_and(|due| due + lateness(name, object) <= now)
    }
}

/// Up to a day, the same for the same object.
fn lateness(name: &str, object: &Object) -> TimeDelta {
    let mut hasher = DefaultHasher::new();
    (name, object.generation).hash(&mut hasher);
    TimeDelta::seconds((hasher.finish() % LATE_SECONDS) as i64)
}

#[derive(Default, serde::Deserialize)]
struct Raw<'a> {
    #[serde(borrow, default)]
    rule: Vec<&'a RawValue>,
}

/// When the last of the conditions of a rule comes true for an object. None: never.
fn due(condition: &Map<String, Value>, name: &str, object: &Object) -> Option<Time> {
    let mut due = object.created;
    for (key, value) in condition {
        let days = || value.as_i64().map(TimeDelta::days);
        let date = || value.as_str().and_then(clock::parse_date);
        let affix = |matches: fn(&str, &str) -> bool| {
            let affixes = value
                .as_array()
                .into_iter()
                .flatten()
                .filter_map(Value::as_str);
            affixes.into_iter().any(|affix| matches(name, affix))
        };
        let holds_since = match key.as_str() {
            "age" => Some(object.created + days()?),
            "daysSinceCustomTime" => Some(object.about.custom_time? + days()?),
            "createdBefore" => (object.created < date()?).then_some(object.created),
            "customTimeBefore" => (object.about.custom_time? < date()?).then_some(object.created),
            "isLive" => (value == &Value::Bool(true)).then_some(object.created),
            "matchesPrefix" => affix(|name, affix| name.starts_with(affix)).then_some(due),
            "matchesSuffix" => affix(|name, affix| name.ends_with(affix)).then_some(due),
            "matchesStorageClass" => affix(|_, class| class == "STANDARD").then_some(due),
            // Of objects that are not live any more; the double keeps no old versions.
            _ => None,
        };
        due = due.max(holds_since?);
    }
    Some(due)
}

/// Refuses what the documents do not have.
fn check(rule: &str) -> Result<(), String> {
    let rule: Map<String, Value> = serde_json::from_str(rule).map_err(|error| error.to_string())?;
    only(&rule, &["action", "condition"])?;
    let action = member(&rule, "action")?;
    let condition = member(&rule, "condition")?;
    let kind = action.get("type").and_then(Value::as_str);
    match kind {
        Some("Delete" | "AbortIncompleteMultipartUpload") => only(action, &["type"])?,
        Some("SetStorageClass") => {
            only(action, &["type", "storageClass"])?;
            let class = action
                .get("storageClass")
                .and_then(Value::as_str)
                .unwrap_or_default();
            if !["STANDARD", "NEARLINE", "COLDLINE", "ARCHIVE"].contains(&class) {
                return Err(format!("{class:?} is no storage class."));
            }
        }
        other => return Err(format!("{other:?} is no lifecycle action.")),
    }
    if condition.is_empty() {
        return Err("A rule needs a condition.".to_owned());
    }
    let aborts = kind == Some("AbortIncompleteMultipartUpload");
    let mut affixes = 0;
    for (key, value) in condition {
        let strings = || -> Option<usize> {
            let list = value.as_array().filter(|list| !list.is_empty())?;
            list.iter().all(Value::is_string).then_some(list.len())
        };
        let good = match key.as_str() {
            "age" => value.as_u64().is_some(),
            "matchesPrefix" | "matchesSuffix" => {
                affixes += strings().unwrap_or(0);
                strings().is_some()
            }
            _ if aborts => false,
            "daysSinceCustomTime" | "daysSinceNoncurrentTime" | "numNewerVersions" => {
                value.as_u64().is_some()
            }
            "createdBefore" | "customTimeBefore" | "noncurrentTimeBefore" => {
                value.as_str().and_then(clock::parse_date).is_some()
            }
            "isLive" => value.is_boolean(),
            "matchesStorageClass" => strings().is_some(),
            _ => false,
        };
        if !good {
            return Err(format!("The lifecycle condition {key} cannot be {value}."));
        }
    }
    if affixes > AFFIXES {
        return Err(format!("A rule may have {AFFIXES} prefixes and suffixes."));
    }
    Ok(())
}

fn member<'a>(rule: &'a Map<String, Value>, name: &str) -> Result<&'a Map<String, Value>, String> {
    let found = rule.get(name).and_then(Value::as_object);
    found.ok_or_else(|| format!("A rule needs an {name}."))
}

fn only(object: &Map<String, Value>, names: &[&str]) -> Result<(), String> {
    match object.keys().find(|key| !names.contains(&key.as_str())) {
        Some(key) => Err(format!("Unknown name {key:?} in a lifecycle rule.")),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::object::About;

    fn read(rules: &str) -> Result<Rules, String> {
        Rules::read(&format!("{{\"rule\":[{rules}]}}"), "")
    }

    const OURS: &str =
        r#"{"action":{"type":"Delete"},"condition":{"age":7,"matchesPrefix":["a/","b/"]}}"#;

    #[test]
    fn takes_what_is_documented_and_nothing_else() {
        read(OURS).unwrap();
        read(r#"{"action":{"type":"SetStorageClass","storageClass":"NEARLINE"},"condition":{"age":1}}"#)
            .unwrap();
        for bad in [
            r#"{"action":{"type":"Nonsense"},"condition":{"age":1}}"#,
            r#"{"action":{"type":"Delete"},"condition":{}}"#,
            r#"{"action":{"type":"Delete"}}"#,
            r#"{"action":{"type":"Delete"},"condition":{"age":"7"}}"#,
            r#"{"action":{"type":"Delete"},"condition":{"age":1.5}}"#,
            r#"{"action":{"type":"Delete"},"condition":{"agee":1}}"#,
            r#"{"action":{"type":"Delete"},"condition":{"age":1},"id":"ours"}"#,
            r#"{"action":{"type":"Delete"},"condition":{"matchesPrefix":"a/"}}"#,
            r#"{"action":{"type":"SetStorageClass"},"condition":{"age":1}}"#,
        ] {
            read(bad).expect_err(bad);
        }
        let many = vec![OURS; RULES + 1].join(",");
        assert!(read(&many).unwrap_err().contains("100"));
        // What is there already may stay, whatever it is.
        let newer = r#"{"rule":[{"action":{"type":"Freeze"},"condition":{"x":1}}]}"#;
        Rules::read(newer, "").unwrap_err();
        Rules::read(newer, newer).unwrap();
    }

    #[test]
    fn strikes_when_all_conditions_hold_and_up_to_a_day_late() {
        let now = clock::Clock::default().now();
        let object = |custom_time| Object {
            data: bytes::Bytes::new(),
            generation: 1,
            metageneration: 1,
            created: now,
            updated: now,
            about: About {
                custom_time,
                ..About::default()
            },
            crc32c: 0,
            md5: None,
        };
        let after = |rules: &Rules, name: &str, object: &Object, days: f64| {
            let at = now + TimeDelta::seconds((days * 86400.0) as i64);
            rules.has_struck(name, object, at)
        };
        let rules = read(OURS).unwrap();
        assert!(!after(&rules, "a/x", &object(None), 6.99));
        assert!(after(&rules, "a/x", &object(None), 8.0));
        assert!(!after(&rules, "c/x", &object(None), 800.0));
        let late = (0..50)
            .filter(|i| after(&rules, &format!("a/{i}"), &object(None), 7.5))
            .count();
        assert!((1..50).contains(&late), "some are late, not {late}");
        let custom =
            read(r#"{"action":{"type":"Delete"},"condition":{"daysSinceCustomTime":3}}"#).unwrap();
        assert!(!after(&custom, "x", &object(None), 800.0));
        assert!(after(&custom, "x", &object(Some(now)), 4.0));
        assert!(!after(
            &custom,
            "x",
            &object(Some(now + TimeDelta::days(2))),
            4.0
        ));
    }
}
