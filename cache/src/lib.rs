//! Content-addressed cache of XLA executables: memory, disk and bucket tiers.
