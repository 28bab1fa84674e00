//! From a program to an entry of the cache: in the child process, or here.

use std::sync::{Arc, atomic::Ordering::Relaxed};

use bytes::Bytes;
use waystation_cache::Entry;
use waystation_pjrt::LoadedExecutable;
use waystation_proto::tensorflow::{StatusProto, error::Code};

use super::{
    Compiler, blocking,
    loaded::{Reach, Source},
    turn,
};
use crate::{child::Digest, counters, hlo::Kept, make, status};

impl Compiler {
    /// Compiles: in the child where there is one, which leaves the executable still to be loaded, else here.
    pub(super) async fn compile(
        self: &Arc<Self>,
        digest: &Digest,
        source: &Source,
    ) -> Result<(Option<LoadedExecutable>, Entry), StatusProto> {
        let program = source.program.clone();
        let oversized = blocking(move || waystation_stablehlo::oversized_array(&program));
        if let Some(dims) = oversized.await? {
            return Err(status::invalid(format!(
                "the program has an array of shape {dims:?}, which has more bytes than 64 bits can count"
            )));
        }
        let dump = source.dump.as_deref();
        let Some(watched) = self.hlo.watch(&source.options, dump) else {
            return self.compile_plainly(digest, source).await;
        };
        let dumping = Source {
            options: watched.options.clone(),
            ..source.clone()
        };
        let compiled = self.compile_plainly(digest, &dumping).await;
        let (executable, entry) = match compiled {
            Err(error) if self.hlo.may_be_to_blame(&error) => {
                let compiled = self.compile_plainly(digest, source).await?;
                // Otherwise a client's option would do, which the plugin refuses and quotes.
                self.hlo.turn_off(&error);
                return Ok(compiled);
            }
            compiled => compiled?,
        };
        let (this, asked) = (Arc::clone(self), source.dump.clone());
        let collect = move || {
            let kept = this.hlo.collect(&watched, asked.as_deref());
            kept.map(Kept::into_text)
        };
        let text = blocking(collect).await?;
        source.dumped.store(dump.is_some(), Relaxed);
        Ok((executable, Entry { text, ..entry }))
    }

    async fn compile_plainly(
        self: &Arc<Self>,
        digest: &Digest,
        source: &Source,
    ) -> Result<(Option<LoadedExecutable>, Entry), StatusProto> {
        if let Some(entry) = self.compile_in_child(digest, source).await? {
            return Ok((None, entry));
        }
        let (executable, entry) = self.compile_here(source.clone()).await?;
        // The wide client's executable runs nothing.
        Ok((
            Some(executable).filter(|_| source.reach != Reach::Hooked),
            entry,
        ))
    }

    /// `None` when there is no child, or the plugin cannot hand over what it has made.
    async fn compile_in_child(
        &self,
        digest: &Digest,
        source: &Source,
    ) -> Result<Option<Entry>, StatusProto> {
        let Some(compilers) = &self.compilers else {
            return Ok(None);
        };
        let _turn = turn(&self.compiles).await?;
        let Some(done) = compilers.compile(digest, source.job()).await? else {
            return Ok(None);
        };
        if let Some(error) = done.not_serialized {
            if of_program(&error, self.has_loaded()) {
                return Err(status::of(
                    Code::Unimplemented,
                    format!(
                        "the program was compiled, but the plugin does not serialize it, as it has to be to come from the \
                         child process that compiles (--compile_in_child=false compiles in the worker): {}",
                        error.message
                    ),
                ));
            }
            compilers.give_up("the plugin does not serialize executables");
            return Ok(None);
        }
        counters::add(&self.counters.compiles, 1);
        counters::add(&self.counters.compile_nanos, done.compile_nanos);
        Ok(Some(Entry {
            info: done.info.unwrap_or_default(),
            executable: done.executable,
            text: None,
            object: None,
        }))
    }

    async fn compile_here(
        self: &Arc<Self>,
        source: Source,
    ) -> Result<(LoadedExecutable, Entry), StatusProto> {
        let made = self.in_turn(&self.compiles, move |this| {
            let (program, options) = (&source.program, &source.options);
            if source.reach == Reach::Hooked {
                make::make_spanning(&this.wide, program, options, source.shape)
            } else {
                make::make(&this.client, program, options, source.shape)
            }
        });
        let made = made.await?;
        counters::add(&self.counters.compiles, 1);
        counters::add_time(&self.counters.compile_nanos, made.took);
        // A plugin that does not serialize has entries without an executable, which the cache does not keep.
        let serialized = made.serialized.unwrap_or_else(|error| {
            tracing::debug!(
                error = error.message,
                "the plugin does not serialize this executable; it is not cached"
            );
            Vec::new()
        });
        let entry = Entry {
            info: made.info,
            executable: Bytes::from(serialized),
            text: None,
            object: None,
        };
        Ok((made.executable, entry))
    }
}

/// Whether a plugin's refusal to serialize or to load speaks of one program, or a client's options for it, and not of the
/// plugin: another reason than UNIMPLEMENTED, or others have been loaded. Such a program fails. To compile it in this
/// process, which it may end, is nothing that a client can bring about.
pub(super) fn of_program(error: &StatusProto, others_loaded: bool) -> bool {
    others_loaded || error.code != Code::Unimplemented as i32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_plugin_that_has_handed_over_nothing_is_unable_to() {
        let unimplemented = status::unimplemented("no serialization");
        assert!(!of_program(&unimplemented, false));
        assert!(of_program(&unimplemented, true));
        let broken = status::of(Code::Unknown, "this one is too large");
        assert!(of_program(&broken, false) && of_program(&broken, true));
    }
}
