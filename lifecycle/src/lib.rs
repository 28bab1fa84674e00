//! The bucket: opening a location, its layout, and how long what it holds is kept.
//!
//! | module | holds |
//! | --- | --- |
//! | [`bucket`] | [`bucket::Location`] (what the user wrote) and [`bucket::Bucket`] (an object store rooted there) |
//! | [`bucket::layout`] | every prefix below a location: who writes it, who reads it, how long it is kept |
//! | [`gcs`] | the few calls of Cloud Storage that `object_store` does not have |
//! | [`policy`] | how long objects are kept: lifecycle rules, sweeping, and which rights that takes |
//!
//! Storage is `object_store` in every scheme; nothing here wraps its trait. Who keeps something in the bucket takes a
//! name from [`bucket::layout`] and goes to [`bucket::Bucket::store`].

pub mod bucket;
mod federation;
pub mod gcs;
pub mod policy;
