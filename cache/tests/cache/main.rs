//! The cache as a worker uses it: over folders, over stores that fail, by several processes' worth of instances.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod bad_entries;
mod claims;
mod cloud;
mod damage;
mod disk;
mod faults;
mod faulty;
mod flights;
mod killed;
mod kit;
mod lives;
mod loads;
mod modes;
mod sharing;
mod signed;
