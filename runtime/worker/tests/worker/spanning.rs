//! Programs whose devices lie on two workers.

mod faults;
mod order;
mod pair;
mod programs;
