//! What the plugin makes of flags, learned by compiling a program that does nothing.

use std::sync::Arc;

use bytes::Bytes;
use waystation_cache::{Key, KeyInputs};
use waystation_lifecycle::bucket::Location;
use waystation_proto::{
    tensorflow::{StatusProto, error::Code},
    waystation::compile::Job,
};
use waystation_stablehlo::{
    compile_options::{EXECUTABLE_BUILD_OPTIONS, NUM_PARTITIONS, NUM_REPLICAS},
    wire::Message,
};

use super::Compiler;
use crate::{
    make,
    program::{self, Defaults},
    status, text,
};

/// A function without arguments and results.
const PROGRAM: &[u8] = include_bytes!("../program/one_line.mlirbc");

impl Compiler {
    /// The debug options that the plugin compiles with by itself. Empty where it does not say, or cannot be asked.
    pub(super) async fn defaults(self: &Arc<Self>) -> &Defaults {
        let ask = async || match self.probe(&[]).await {
            Ok(options) => Defaults::new(options),
            Err(error) => {
                tracing::warn!(
                    error = error.message,
                    "the plugin's own options are not known: flags count in keys even where they change nothing"
                );
                Defaults::default()
            }
        };
        self.defaults.get_or_init(ask).await
    }

    /// Has the plugin say whether it knows the proxy's flags.
    ///
    /// # Errors
    /// INVALID_ARGUMENT with the flag, the plugin's words and what may have been meant; whatever else goes wrong.
    pub(crate) async fn check_flags(
        self: &Arc<Self>,
        xla_flags: &[String],
    ) -> Result<(), StatusProto> {
        match self.probe(xla_flags).await {
            Ok(_) => Ok(()),
            Err(error) if error.code == Code::InvalidArgument as i32 => {
                Err(with_flag(error, xla_flags))
            }
            Err(error) => Err(error),
        }
    }

    /// The debug options that the plugin compiles with under these flags.
    async fn probe(self: &Arc<Self>, xla_flags: &[String]) -> Result<Vec<u8>, StatusProto> {
        let device = self
            .client
            .devices()
            .first()
            .map_or(0, |device| device.id());
        let prepared = program::prepare(&alone(), &[0], |_| Some(device), xla_flags)
            .map_err(|error| status::invalid(error.to_string()))?;
        let mut options = prepared.plugin_options;
        // Kept until the plugin has written there.
        let mut folder = None;
        if let Some(dump) = &prepared.dump {
            Location::parse(&dump.to)
                .map_err(|error| status::invalid(format!("--xla_dump_to: {error}")))?;
            let private = text::folder()?;
            options = program::with_dump(&options, private.path(), Some(dump))
                .map_err(|error| status::invalid(error.to_string()))?;
            folder = Some(private);
        }
        let key = Key::of(&KeyInputs {
            program: PROGRAM,
            options: &options,
            ..KeyInputs::default()
        });
        let job = Job {
            program: Bytes::from_static(PROGRAM),
            options: options.clone().into(),
            num_replicas: 1,
            num_partitions: 1,
            probe: true,
            ..Job::default()
        };
        if let Some(compilers) = &self.compilers {
            let _turn = super::turn(&self.compiles).await?;
            if let Some(done) = compilers.compile(key.digest(), job).await? {
                return Ok(done.debug_options.into());
            }
        }
        let probed = self.in_turn(&self.compiles, move |this| {
            make::probe(&this.client, PROGRAM, &options)
        });
        let probed = probed.await;
        drop(folder);
        probed
    }
}

/// Options of a program for one device.
fn alone() -> Vec<u8> {
    let mut build = Message::default();
    build.push_varint(NUM_REPLICAS, 1);
    build.push_varint(NUM_PARTITIONS, 1);
    let mut options = Message::default();
    options.push_bytes(EXECUTABLE_BUILD_OPTIONS, &build.encode());
    options.encode()
}

/// Names the flag that the plugin's words are about, and flags that look like it.
fn with_flag(error: StatusProto, xla_flags: &[String]) -> StatusProto {
    let words = error.message.trim();
    let named = |flag: &&String| {
        let name = name_of(flag);
        // As a whole: names begin alike.
        words
            .split(|c: char| !(c.is_ascii_alphanumeric() || c == '_'))
            .any(|word| word == name)
    };
    let Some(flag) = xla_flags.iter().rev().find(named) else {
        return error;
    };
    let mut message = format!("the plugin refuses {flag}: {words}");
    let name = name_of(flag);
    let similar = program::similar(&name);
    if !similar.is_empty() && !similar.contains(&name.as_str()) {
        let similar: Vec<_> = similar.iter().map(|name| format!("--{name}")).collect();
        message = format!("{message}; XLA has {}", similar.join(", "));
    }
    StatusProto { message, ..error }
}

fn name_of(flag: &str) -> String {
    let body = flag.trim_start_matches('-');
    let name = body.split_once('=').map_or(body, |(name, _)| name);
    name.replace('-', "_")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(words: &str, flags: &[&str]) -> String {
        let flags: Vec<_> = flags.iter().map(|flag| (*flag).to_owned()).collect();
        with_flag(status::invalid(words), &flags).message
    }

    #[test]
    fn a_refusal_names_the_flag_and_what_was_meant() {
        assert_eq!(
            refused(
                "No such compile option: 'xla_cpu_enable_fast_maths'",
                &[
                    "--xla_cpu_enable_fast_math",
                    "--xla_cpu_enable_fast_maths=1"
                ]
            ),
            "the plugin refuses --xla_cpu_enable_fast_maths=1: No such compile option: 'xla_cpu_enable_fast_maths'; \
             XLA has --xla_cpu_enable_fast_math, --xla_enable_fast_math, --xla_cpu_enable_fast_min_max"
        );
        assert_eq!(
            refused(
                "While setting option xla_backend_optimization_level, 'x' is not a valid int32 value.",
                &["--xla-backend-optimization-level=x"]
            ),
            "the plugin refuses --xla-backend-optimization-level=x: While setting option xla_backend_optimization_level, \
             'x' is not a valid int32 value."
        );
        assert_eq!(
            refused("no flag of these", &["--xla_a"]),
            "no flag of these"
        );
    }
}
