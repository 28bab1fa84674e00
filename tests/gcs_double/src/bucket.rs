//! One bucket and its objects. No HTTP, no permissions: only what holds of the data.

use std::collections::BTreeMap;
use std::time::Duration;

use bytes::Bytes;
use serde_json::value::RawValue;

use crate::clock::Time;
use crate::hash;
use crate::lifecycle::Rules;
use crate::object::{About, Conditions, Object};
use crate::reply::Refusal;

/// Cloud Storage's limits: about one write a second to one object name, and one update a second to one bucket.
const PACE: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub(crate) struct Bucket {
    pub(crate) name: String,
    pub(crate) created: Time,
    pub(crate) updated: Time,
    pub(crate) metageneration: i64,
    /// As it was sent, so that it comes back byte for byte.
    pub(crate) lifecycle: Option<Box<RawValue>>,
    pub(crate) rules: Rules,
    pub(crate) objects: BTreeMap<String, Object>,
    /// When a name was last written; kept when the object goes.
    written: BTreeMap<String, Time>,
    last_update: Option<Time>,
    last_generation: i64,
    /// Whether [`PACE`] is kept.
    pub(crate) paced: bool,
}

/// The page of a list.
#[derive(Debug, Default)]
pub(crate) struct Page {
    pub(crate) names: Vec<String>,
    pub(crate) prefixes: Vec<String>,
    /// Name or prefix that the page ends with, when there is more.
    pub(crate) next: Option<String>,
}

/// What a list asks for.
#[derive(Debug, Default)]
pub(crate) struct Listing<'a> {
    pub(crate) prefix: &'a str,
    pub(crate) delimiter: &'a str,
    /// Last name or prefix of the page before.
    pub(crate) after: Option<&'a str>,
    /// First name that counts.
    pub(crate) start: Option<&'a str>,
    /// First name that does not count any more.
    pub(crate) end: Option<&'a str>,
    pub(crate) limit: usize,
}

impl Bucket {
    pub(crate) fn new(name: &str, now: Time) -> Bucket {
        Bucket {
            name: name.to_owned(),
            created: now,
            updated: now,
            metageneration: 1,
            lifecycle: None,
            rules: Rules::default(),
            objects: BTreeMap::new(),
            written: BTreeMap::new(),
            last_update: None,
            last_generation: 0,
            paced: true,
        }
    }

    pub(crate) fn get(&self, name: &str) -> Result<&Object, Refusal> {
        self.objects
            .get(name)
            .ok_or_else(|| Refusal::NoObject(name.to_owned()))
    }

    /// Creates or replaces an object.
    pub(crate) fn put(
        &mut self,
        name: &str,
        data: Bytes,
        about: About,
        conditions: &Conditions,
        now: Time,
    ) -> Result<&Object, Refusal> {
        if name.is_empty() || name.len() > 1024 {
            return Err(Refusal::Invalid(
                "an object needs a name of 1 to 1024 bytes".to_owned(),
            ));
        }
        conditions.allow_write(self.objects.get(name))?;
        self.pace(name, now)?;
        let generation = now.timestamp_micros().max(self.last_generation + 1);
        self.last_generation = generation;
        let object = Object {
            crc32c: hash::crc32c(&data),
            md5: Some(hash::md5(&data)),
            data,
            generation,
            metageneration: 1,
            created: now,
            updated: now,
            about,
        };
        self.objects.insert(name.to_owned(), object);
        self.get(name)
    }

    pub(crate) fn delete(&mut self, name: &str, conditions: &Conditions) -> Result<(), Refusal> {
        conditions.allow_write(Some(self.get(name)?))?;
        self.objects.remove(name);
        Ok(())
    }

    /// Changes what is said of an object, but not its data. A custom time only goes forward.
    pub(crate) fn describe(
        &mut self,
        name: &str,
        conditions: &Conditions,
        now: Time,
        change: impl FnOnce(&mut About) -> Result<(), Refusal>,
    ) -> Result<&Object, Refusal> {
        let object = self.get(name)?;
        conditions.allow_write(Some(object))?;
        let mut about = object.about.clone();
        change(&mut about)?;
        if about.custom_time < object.about.custom_time {
            let text = "Custom time cannot be removed or set to an earlier date time.";
            return Err(Refusal::Invalid(text.to_owned()));
        }
        self.pace(name, now)?;
        if let Some(object) = self.objects.get_mut(name) {
            object.about = about;
            object.metageneration += 1;
            object.updated = now;
        }
        self.get(name)
    }

    /// Replaces the lifecycle; None removes it.
    pub(crate) fn set_lifecycle(
        &mut self,
        lifecycle: Option<Box<RawValue>>,
        now: Time,
    ) -> Result<(), Refusal> {
        if self.paced
            && self
                .last_update
                .is_some_and(|last| now - last < as_delta(PACE))
        {
            return Err(Refusal::TooOften(format!("The bucket {}", self.name)));
        }
        let known = self.lifecycle.as_deref().map_or("", RawValue::get);
        let rules = match &lifecycle {
            Some(lifecycle) => Rules::read(lifecycle.get(), known).map_err(Refusal::Invalid)?,
            None => Rules::default(),
        };
        self.seed_lifecycle(lifecycle, rules, now);
        self.last_update = Some(now);
        Ok(())
    }

    /// As somebody else put it there before, in whatever form.
    pub(crate) fn seed_lifecycle(
        &mut self,
        lifecycle: Option<Box<RawValue>>,
        rules: Rules,
        now: Time,
    ) {
        self.lifecycle = lifecycle;
        self.rules = rules;
        self.metageneration += 1;
        self.updated = now;
    }

    /// Lets the rules act.
    pub(crate) fn expire(&mut self, now: Time) {
        let rules = &self.rules;
        self.objects
            .retain(|name, object| !rules.has_struck(name, object, now));
    }

    /// Moves all times of objects into the past.
    pub(crate) fn age(&mut self, by: Duration) {
        let by = as_delta(by);
        for object in self.objects.values_mut() {
            object.created -= by;
            object.updated -= by;
            let custom = object.about.custom_time.as_mut();
            custom.into_iter().for_each(|time| *time -= by);
        }
        self.written.values_mut().for_each(|time| *time -= by);
    }

    pub(crate) fn list(&self, asked: &Listing<'_>) -> Page {
        let mut page = Page::default();
        let Listing {
            prefix, delimiter, ..
        } = *asked;
        for name in self.objects.keys().filter(|name| name.starts_with(prefix)) {
            let counts = asked.start.is_none_or(|start| name.as_str() >= start)
                && asked.end.is_none_or(|end| name.as_str() < end);
            if !counts {
                continue;
            }
            let rest = &name[prefix.len()..];
            let cut = if delimiter.is_empty() {
                None
            } else {
                rest.find(delimiter)
            };
            let shown = match cut {
                Some(at) => &name[..prefix.len() + at + delimiter.len()],
                None => name,
            };
            let seen = asked.after.is_some_and(|after| shown <= after)
                || page.prefixes.last().is_some_and(|last| last == shown);
            if seen {
                continue;
            }
            if page.names.len() + page.prefixes.len() == asked.limit.max(1) {
                let last = page
                    .names
                    .last()
                    .into_iter()
                    .chain(page.prefixes.last())
                    .max();
                page.next = last.cloned();
                break;
            }
            match cut {
                Some(_) => page.prefixes.push(shown.to_owned()),
                None => page.names.push(name.clone()),
            }
        }
        page
    }

    fn pace(&mut self, name: &str, now: Time) -> Result<(), Refusal> {
        let last = self.written.get(name);
        if self.paced && last.is_some_and(|last| now - *last < as_delta(PACE)) {
            return Err(Refusal::TooOften(format!(
                "The object {}/{name}",
                self.name
            )));
        }
        self.written.insert(name.to_owned(), now);
        Ok(())
    }
}

fn as_delta(duration: Duration) -> chrono::TimeDelta {
    chrono::TimeDelta::from_std(duration).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::Clock;

    fn bucket(names: &[&str]) -> Bucket {
        let now = Clock::default().now();
        let mut bucket = Bucket::new("b", now);
        for name in names {
            let put = bucket.put(
                name,
                Bytes::new(),
                About::default(),
                &Conditions::default(),
                now,
            );
            put.unwrap();
        }
        bucket
    }

    #[test]
    fn lists_in_pages_with_and_without_a_delimiter() {
        let bucket = bucket(&["a/1", "a/2", "b", "c/1", "c/2", "d"]);
        let walk = |delimiter: &str, limit| {
            let (mut found, mut after) = (Vec::new(), None);
            loop {
                let asked = Listing {
                    delimiter,
                    after: after.as_deref(),
                    limit,
                    ..Listing::default()
                };
                let page = bucket.list(&asked);
                assert!(page.names.len() + page.prefixes.len() <= limit);
                found.extend(page.prefixes);
                found.extend(page.names);
                match page.next {
                    Some(next) => after = Some(next),
                    None => break,
                }
            }
            found.sort();
            found
        };
        for limit in 1..8 {
            assert_eq!(walk("", limit), ["a/1", "a/2", "b", "c/1", "c/2", "d"]);
            assert_eq!(walk("/", limit), ["a/", "b", "c/", "d"]);
        }
        let asked = Listing {
            start: Some("a/2"),
            end: Some("c/2"),
            limit: 9,
            ..Listing::default()
        };
        assert_eq!(bucket.list(&asked).names, ["a/2", "b", "c/1"]);
    }

    #[test]
    fn one_name_takes_one_write_a_second() {
        let mut bucket = bucket(&["a"]);
        let now = bucket.created;
        let put = |bucket: &mut Bucket, name: &str, at| {
            let put = bucket.put(
                name,
                Bytes::new(),
                About::default(),
                &Conditions::default(),
                at,
            );
            put.map(|object| object.generation)
        };
        assert!(matches!(
            put(&mut bucket, "a", now),
            Err(Refusal::TooOften(_))
        ));
        let other = put(&mut bucket, "b", now).unwrap();
        let later = put(&mut bucket, "a", now + PACE).unwrap();
        assert!(later > other);
    }

    #[test]
    fn conditions_hold_of_every_verb() {
        let mut bucket = bucket(&["a"]);
        bucket.paced = false;
        let (now, generation) = (bucket.created, bucket.get("a").unwrap().generation);
        let wrong = Conditions {
            generation: Some(generation + 1),
            ..Conditions::default()
        };
        let right = Conditions {
            generation: Some(generation),
            ..Conditions::default()
        };
        let create = Conditions {
            generation: Some(0),
            ..Conditions::default()
        };
        for bad in [&wrong, &create] {
            let put = bucket.put("a", Bytes::new(), About::default(), bad, now);
            assert_eq!(put.unwrap_err(), Refusal::Precondition);
            assert_eq!(bucket.delete("a", bad), Err(Refusal::Precondition));
            assert!(bucket.describe("a", bad, now, |_| Ok(())).is_err());
        }
        assert_eq!(
            bucket
                .describe("a", &right, now, |_| Ok(()))
                .unwrap()
                .metageneration,
            2
        );
        bucket.delete("a", &right).unwrap();
        assert!(matches!(
            bucket.delete("a", &right),
            Err(Refusal::NoObject(_))
        ));
        bucket
            .put("a", Bytes::new(), About::default(), &create, now)
            .unwrap();
    }

    #[test]
    fn a_custom_time_goes_forward_only() {
        let mut bucket = bucket(&["a"]);
        bucket.paced = false;
        let now = bucket.created;
        let mut set = |time| {
            let set = |about: &mut About| {
                about.custom_time = time;
                Ok(())
            };
            bucket
                .describe("a", &Conditions::default(), now, set)
                .is_ok()
        };
        assert!(set(Some(now)));
        assert!(set(Some(now + PACE)));
        assert!(!set(Some(now)));
        assert!(!set(None));
    }
}
