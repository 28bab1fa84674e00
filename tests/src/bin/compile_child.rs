//! What `waystation compile-child` is: the process that a worker compiles in. Takes any arguments, which tell one from the
//! other.

use std::process::ExitCode;

fn main() -> ExitCode {
    match waystation_worker::compile_child() {
        Ok(never) => match never {},
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}
