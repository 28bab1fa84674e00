//! XLA's text of a program after optimization, for a client that asks for it.

use std::sync::Arc;

use waystation_proto::{tensorflow::StatusProto, waystation::compile::Job};

use super::{
    Compiler, Loaded, blocking,
    loaded::{Reach, Source},
    turn,
};
use crate::{child::Digest, make, status, text};

impl Compiler {
    /// XLA's text of the optimized program. Where none was kept, the program is compiled once more for it.
    pub(crate) async fn text(self: &Arc<Self>, loaded: &Loaded) -> Result<String, StatusProto> {
        if let Some(kept) = loaded.kept.clone()
            && let Some(text) = blocking(move || kept.optimized()).await?
        {
            return Ok(text);
        }
        let source = loaded.source.get().ok_or_else(|| {
            status::unimplemented(
                "the program's text is known to the worker that compiled it, and this one has only loaded it",
            )
        })?;
        let folder = text::folder()?;
        let options = text::options(&source.options, &folder, None)?;
        let source = Source {
            options: options.into(),
            ..source.clone()
        };
        if !self.write_in_child(&loaded.digest, &source).await? {
            let compile = move |this: &Compiler| {
                let (program, options) = (&source.program, &source.options);
                if source.reach == Reach::Hooked {
                    let client = this.wide.client(source.shape)?;
                    return make::compile_spanning(&client, program, options, source.shape, |_| ())
                        .map(drop);
                }
                make::compile(&this.client, program, options).map(drop)
            };
            self.in_turn(&self.compiles, compile).await?;
        }
        blocking(move || text::read(&folder)).await?
    }

    /// Compiles in the child for what the plugin writes on the way. False when there is no child.
    async fn write_in_child(&self, digest: &Digest, source: &Source) -> Result<bool, StatusProto> {
        let Some(compilers) = &self.compilers else {
            return Ok(false);
        };
        let _turn = turn(&self.compiles).await?;
        let job = Job {
            discard: true,
            ..source.job()
        };
        Ok(compilers.compile(digest, job).await?.is_some())
    }
}
