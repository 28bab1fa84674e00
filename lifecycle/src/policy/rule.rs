//! The texts of rules, and our rules among those of others. Pure.
//!
//! A lifecycle rule of Cloud Storage has no name. Ours is the one that deletes, on exactly our prefixes, by age or custom
//! time and by nothing else. Everything else in the list is somebody else's and goes back as it came, byte for byte:
//! the rules of others are never parsed into something that is written again.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::value::RawValue;
use serde_json::{Map, Value, json};

use super::{Policy, Renew, expiring};
use crate::bucket::layout;

/// The age, in TTLs, at which an object goes that nobody ever gave a custom time.
const WITHOUT_CUSTOM_TIME: u64 = 4;

/// Our prefixes in a bucket, for a location with this prefix.
pub fn prefixes(location_prefix: &str) -> Vec<String> {
    let whole = |path: &str| match location_prefix {
        "" => path.to_owned(),
        prefix => format!("{prefix}/{path}"),
    };
    // Where rules act, nobody sweeps.
    let acting = expiring().filter(|prefix| *prefix != layout::SWEEPS);
    acting.map(|prefix| whole(prefix.path)).collect()
}

/// Our rules for Cloud Storage, each as JSON.
pub fn for_gcs(location_prefix: &str, policy: &Policy) -> Vec<String> {
    let prefixes = prefixes(location_prefix);
    let days = policy.ttl.days();
    let rule = |condition: &str, days: u64| {
        json!({
            "action": {"type": "Delete"},
            "condition": {condition: days, "matchesPrefix": prefixes},
        })
        .to_string()
    };
    match policy.renew {
        Renew::Publish => vec![rule("age", days)],
        Renew::CustomTime => {
            vec![
                rule("daysSinceCustomTime", days),
                rule("age", days * WITHOUT_CUSTOM_TIME),
            ]
        }
    }
}

/// The rules that a user of S3 has to set, each as JSON: one takes one prefix there.
pub fn for_s3(location_prefix: &str, policy: &Policy) -> Vec<String> {
    let days = policy.ttl.days();
    prefixes(location_prefix)
        .into_iter()
        .map(|prefix| {
            json!({
                "ID": format!("waystation {prefix}"),
                "Status": "Enabled",
                "Filter": {"Prefix": prefix},
                "Expiration": {"Days": days},
            })
            .to_string()
        })
        .collect()
}

/// What has to be done to a bucket's lifecycle.
#[derive(Debug)]
pub(super) enum Change {
    /// Our rules are there.
    None,
    /// This is to take its place.
    To(Box<RawValue>),
    /// Our rules do not fit beside those of others.
    NoRoom {
        /// Rules that are there.
        found: usize,
    },
}

/// The lifecycle with our rules in it.
///
/// # Errors
/// Where what is there is no lifecycle.
pub(super) fn change(
    current: Option<&RawValue>,
    location_prefix: &str,
    policy: &Policy,
) -> serde_json::Result<Change> {
    let (mut members, rules) = read(current)?;
    let prefixes: BTreeSet<String> = prefixes(location_prefix).into_iter().collect();
    let (ours, theirs): (Vec<&RawValue>, Vec<&RawValue>) = rules
        .iter()
        .partition(|rule| is_ours(rule.get(), &prefixes));
    let wanted = for_gcs(location_prefix, policy);
    if is_same(&ours, &wanted) {
        return Ok(Change::None);
    }
    let count = theirs.len() + wanted.len();
    if count > policy.max_rules && count > rules.len() {
        return Ok(Change::NoRoom { found: rules.len() });
    }
    let list: Vec<&str> = theirs
        .iter()
        .map(|rule| rule.get())
        .chain(wanted.iter().map(String::as_str))
        .collect();
    let list = RawValue::from_string(format!("[{}]", list.join(",")))?;
    members.insert("rule".to_owned(), &list);
    Ok(Change::To(serde_json::value::to_raw_value(&members)?))
}

/// Our rules, whatever their time to live.
pub(super) fn present(
    current: Option<&RawValue>,
    location_prefix: &str,
) -> serde_json::Result<Vec<String>> {
    let (_, rules) = read(current)?;
    let prefixes: BTreeSet<String> = prefixes(location_prefix).into_iter().collect();
    let ours = rules
        .iter()
        .map(|rule| rule.get())
        .filter(|rule| is_ours(rule, &prefixes));
    Ok(ours.map(str::to_owned).collect())
}

/// A lifecycle's members, and its rules.
type Lifecycle<'a> = (BTreeMap<String, &'a RawValue>, Vec<&'a RawValue>);

fn read(current: Option<&RawValue>) -> serde_json::Result<Lifecycle<'_>> {
    let text = current.map_or("{}", RawValue::get);
    // A lifecycle that was taken away may come as null.
    let members: Option<BTreeMap<String, &RawValue>> = serde_json::from_str(text)?;
    let members = members.unwrap_or_default();
    let rules = match members.get("rule") {
        Some(rules) => serde_json::from_str::<Option<_>>(rules.get())?.unwrap_or_default(),
        None => Vec::new(),
    };
    Ok((members, rules))
}

fn is_ours(rule: &str, prefixes: &BTreeSet<String>) -> bool {
    let Ok(rule) = serde_json::from_str::<Map<String, Value>>(rule) else {
        return false;
    };
    let Some(condition) = rule.get("condition").and_then(Value::as_object) else {
        return false;
    };
    let deletes = rule.len() == 2 && rule.get("action") == Some(&json!({"type": "Delete"}));
    let by_time = condition.len() == 2
        && ["age", "daysSinceCustomTime"]
            .iter()
            .any(|time| condition.contains_key(*time));
    let on = condition.get("matchesPrefix").and_then(Value::as_array);
    let on: Option<BTreeSet<_>> = on.map(|list| {
        list.iter()
            .filter_map(Value::as_str)
            .map(str::to_owned)
            .collect()
    });
    deletes && by_time && on.as_ref() == Some(prefixes)
}

/// Whether our rules that are there are the wanted ones, however they are spaced and ordered.
fn is_same(ours: &[&RawValue], wanted: &[String]) -> bool {
    let sorted = |text: &str| {
        let mut rule: Value = serde_json::from_str(text).unwrap_or_default();
        if let Some(list) = rule["condition"]["matchesPrefix"].as_array_mut() {
            list.sort_by(|a, b| a.as_str().cmp(&b.as_str()));
        }
        rule.to_string()
    };
    let ours: Vec<_> = ours.iter().map(|rule| sorted(rule.get())).collect();
    let wanted: Vec<_> = wanted.iter().map(|rule| sorted(rule)).collect();
    ours.len() == wanted.len() && wanted.iter().all(|rule| ours.contains(rule))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policy(ttl: &str) -> Policy {
        Policy {
            ttl: ttl.parse().unwrap(),
            ..Policy::default()
        }
    }

    fn changed(current: &str, policy: &Policy) -> Option<String> {
        let current = RawValue::from_string(current.to_owned()).unwrap();
        match change(Some(&current), "team/a", policy).unwrap() {
            Change::To(new) => Some(new.get().to_owned()),
            Change::None => None,
            Change::NoRoom { .. } => panic!("no room"),
        }
    }

    /// Held against Cloud Storage's documents by hand; the double refuses what they do not have.
    #[test]
    fn the_rules_are_these() {
        let on = r#"["team/a/exe/v1/","team/a/claim/v1/"]"#;
        assert_eq!(
            for_gcs("team/a", &policy("30d")),
            [format!(
                r#"{{"action":{{"type":"Delete"}},"condition":{{"age":30,"matchesPrefix":{on}}}}}"#
            )]
        );
        let custom = Policy {
            renew: Renew::CustomTime,
            ..policy("12h")
        };
        assert_eq!(
            for_gcs("team/a", &custom),
            [
                format!(
                    r#"{{"action":{{"type":"Delete"}},"condition":{{"daysSinceCustomTime":1,"matchesPrefix":{on}}}}}"#
                ),
                format!(
                    r#"{{"action":{{"type":"Delete"}},"condition":{{"age":4,"matchesPrefix":{on}}}}}"#
                ),
            ]
        );
        assert!(for_gcs("", &policy("1d"))[0].contains(r#"["exe/v1/","#));
        assert_eq!(
            for_s3("", &policy("7d"))[0],
            r#"{"Expiration":{"Days":7},"Filter":{"Prefix":"exe/v1/"},"ID":"waystation exe/v1/","Status":"Enabled"}"#
        );
        // What a user recorded on purpose is on no rule.
        assert_eq!(prefixes("p"), ["p/exe/v1/", "p/claim/v1/"]);
    }

    #[test]
    fn the_rules_of_others_and_what_is_unknown_go_back_byte_for_byte() {
        let theirs = r#"{ "condition" : {"age":1e1,"newCondition":[1.50]} , "action":{"type":"Freeze"},"age":1,"age":2}"#;
        let current = format!(r#"{{"mode": {{"x" : 1.0}}, "rule" : [{theirs}]}}"#);
        let new = changed(&current, &policy("30d")).unwrap();
        let ours = &for_gcs("team/a", &policy("30d"))[0];
        assert_eq!(
            new,
            format!(r#"{{"mode":{{"x" : 1.0}},"rule":[{theirs},{ours}]}}"#)
        );
        assert_eq!(changed(&new, &policy("30d")), None, "idempotent");
    }

    #[test]
    fn our_rule_of_another_time_is_replaced_and_one_like_ours_is_not() {
        let old = changed("{}", &policy("30d")).unwrap();
        let new = changed(&old, &policy("7d")).unwrap();
        assert_eq!(new, changed("{}", &policy("7d")).unwrap());
        let custom = Policy {
            renew: Renew::CustomTime,
            ..policy("7d")
        };
        let both = changed(&new, &custom).unwrap();
        assert_eq!(both.matches("matchesPrefix").count(), 2);
        assert_eq!(changed(&both, &policy("7d")).unwrap(), new);
        // Somebody's own rule on one of our prefixes, or with a condition more.
        for theirs in [
            r#"{"action":{"type":"Delete"},"condition":{"age":7,"matchesPrefix":["team/a/exe/v1/"]}}"#.to_owned(),
            for_gcs("team/a", &policy("7d"))[0].replace("\"age\"", "\"isLive\":true,\"age\""),
            for_gcs("team/a", &policy("7d"))[0].replace("Delete", "SetStorageClass"),
            for_gcs("team/b", &policy("7d"))[0].clone(),
        ] {
            let new = changed(&format!(r#"{{"rule":[{theirs}]}}"#), &policy("30d")).unwrap();
            assert!(new.contains(&theirs), "{new}");
            assert_eq!(new.matches("action").count(), 2);
        }
    }

    #[test]
    fn spacing_and_order_of_ours_do_not_count() {
        let spaced = r#"{"rule":[{"condition": {"matchesPrefix": [
            "team/a/claim/v1/", "team/a/exe/v1/"], "age": 30}, "action": {"type": "Delete"}}]}"#;
        assert_eq!(changed(spaced, &policy("30d")), None);
    }

    #[test]
    fn at_the_limit_nothing_is_added_but_ours_may_change() {
        let theirs = |count| {
            let rule =
                r#"{"action":{"type":"Delete"},"condition":{"age":7,"matchesPrefix":["x/"]}}"#;
            vec![rule; count].join(",")
        };
        let current =
            |text: String| RawValue::from_string(format!(r#"{{"rule":[{text}]}}"#)).unwrap();
        let full = change(Some(&current(theirs(50))), "p", &Policy::default()).unwrap();
        assert!(matches!(full, Change::NoRoom { found: 50 }));
        let room = change(Some(&current(theirs(49))), "p", &Policy::default()).unwrap();
        assert!(matches!(room, Change::To(_)));
        let ours = &for_gcs("p", &policy("7d"))[0];
        let with_ours = current(format!("{},{ours}", theirs(50)));
        let replaced = change(Some(&with_ours), "p", &Policy::default()).unwrap();
        assert!(matches!(replaced, Change::To(_)));
        let odd = RawValue::from_string("[1]".to_owned()).unwrap();
        change(Some(&odd), "p", &Policy::default()).unwrap_err();
        let null = RawValue::from_string("null".to_owned()).unwrap();
        assert!(matches!(
            change(Some(&null), "p", &Policy::default()).unwrap(),
            Change::To(_)
        ));
    }
}
