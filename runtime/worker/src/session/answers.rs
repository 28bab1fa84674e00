//! Questions about programs and layouts.

use std::{collections::HashMap, sync::Arc};

use waystation_pjrt::{Code, OptionValue};
use waystation_proto::{
    tensorflow::StatusProto,
    waystation::worker::{Answer, CheckFlags, CostAnalysis, DefaultLayout, ProgramText},
};

use super::{Session, program::Loaded};
use crate::{compiler::blocking, core::Core, dtype::Dtype, status};

impl Session {
    pub(super) fn program_text(&mut self, op: &ProgramText) {
        let request = op.request;
        self.ask_program(request, op.executable, |core, loaded| async move {
            let text = core.compiler.text(&loaded).await?;
            Ok(Answer {
                text,
                ..Answer::default()
            })
        });
    }

    pub(super) fn cost_analysis(&mut self, op: &CostAnalysis) {
        self.ask_program(op.request, op.executable, |_, loaded| async move {
            let numbers = blocking(move || costs(&loaded)).await??;
            Ok(Answer {
                numbers,
                ..Answer::default()
            })
        });
    }

    /// Answers a question about a program beside the dispatch thread, when the program is compiled.
    fn ask_program<A>(
        &mut self,
        request: u64,
        executable: u64,
        question: impl FnOnce(Arc<Core>, Arc<Loaded>) -> A + Send + 'static,
    ) where
        A: Future<Output = Result<Answer, StatusProto>> + Send + 'static,
    {
        let Some(program) = self.programs.get(&executable).cloned() else {
            self.answer(
                request,
                Err(status::invalid(format!(
                    "executable {executable} is unknown to this worker"
                ))),
            );
            return;
        };
        if let Err(status) = self.room_to_wait() {
            self.answer(request, Err(status));
            return;
        }
        let asked = std::rc::Rc::clone(&program);
        self.when_loaded(&program, move |session| {
            let loaded = match asked.result() {
                Ok(loaded) => loaded,
                Err(fault) => {
                    session.answer(request, Err(Arc::unwrap_or_clone(fault)));
                    return;
                }
            };
            let (core, serial) = (Arc::clone(&session.core), session.serial);
            session.core.runtime.spawn(async move {
                let result = question(Arc::clone(&core), loaded).await;
                core.post(serial, move |session| session.answer(request, result));
            });
        });
    }

    /// Answers beside the dispatch thread whether the plugin knows the flags.
    pub(super) fn check_flags(&mut self, op: CheckFlags) {
        let CheckFlags { request, xla_flags } = op;
        let (core, serial) = (Arc::clone(&self.core), self.serial);
        self.core.runtime.spawn(async move {
            let known = core.compiler.check_flags(&xla_flags).await;
            let result = known.map(|()| Answer::default());
            core.post(serial, move |session| session.answer(request, result));
        });
    }

    pub(super) fn default_layout(&mut self, op: &DefaultLayout) {
        let text = Dtype::of_number(op.dtype).and_then(|dtype| {
            self.core.memory(op.device, &op.memory_kind)?;
            self.core
                .client
                .default_layout(dtype.element, &op.dims)
                .map_err(|error| status::of_plugin(&error, 0))
        });
        self.answer(
            op.request,
            text.map(|text| Answer {
                text,
                ..Answer::default()
            }),
        );
    }
}

/// What the plugin says that an execution costs; where it does not, what was counted when the program was compiled.
fn costs(loaded: &Loaded) -> Result<HashMap<String, f64>, StatusProto> {
    match loaded.executable.cost_analysis() {
        Ok(costs) => Ok(costs
            .into_iter()
            .filter_map(|(name, value)| Some((name, number(&value)?)))
            .collect()),
        // An entry made before costs were counted has none.
        Err(error) if error.code() == Code::Unimplemented && !loaded.info.cost.is_empty() => {
            Ok(loaded.info.cost.clone().into_iter().collect())
        }
        Err(error) => Err(status::of_plugin(&error, 0)),
    }
}

/// A cost as a number; costs that are none are left out.
#[expect(clippy::cast_precision_loss, reason = "costs are estimates")]
fn number(value: &OptionValue) -> Option<f64> {
    match value {
        OptionValue::Int64(value) => Some(*value as f64),
        OptionValue::Float(value) => Some(f64::from(*value)),
        OptionValue::String(_) | OptionValue::Int64List(_) | OptionValue::Bool(_) => None,
    }
}
