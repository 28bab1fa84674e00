//! Programs whose devices lie on two workers.

mod broken;
mod faults;
mod order;
mod pair;
mod programs;
