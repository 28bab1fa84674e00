//! Sharded arrays on a bucket: shardings, zarr, save and restore.
