//! Execute: result shards are named here and now, the work is the worker's.

use std::sync::Arc;

use waystation_proto::{
    waystation::worker::{Execute, op},
    xla::ifrt::{
        ShapeProto,
        proxy::{
            LoadedExecutableExecuteRequest, LoadedExecutableExecuteResponse,
            ifrt_response::Response, loaded_executable_execute_response::Output,
        },
    },
};

use super::{
    Future, Handled, Outcome, Session, UserContext,
    arrays::result_handles,
    compiled::XlaProgram,
    lock,
    placement::Placement,
    programs::{Program, ResultSpec},
    record_only,
};
use crate::{
    array::{Array, Failure, Shard},
    convert::{self, Dtype},
    counters::Counters,
    link::{self, Answer, launch_together},
    needs::Needs,
    status::{self, Status},
};

/// Arguments as the op carries them.
struct Arguments {
    /// `[argument][device]`.
    shards: Vec<u64>,
    /// Parameters that must not be taken over, ascending.
    non_donatable: Vec<i32>,
    /// Handles of the arrays that are gone after this execution.
    donated: Vec<u64>,
    /// What they still need, all together.
    needs: Needs,
}

impl Session {
    pub(super) async fn execute(
        &mut self,
        user_context: &UserContext,
        request: LoadedExecutableExecuteRequest,
    ) -> Handled {
        if self.shared.records_only() {
            return Err(record_only::refusal("execute"));
        }
        match self.program(request.loaded_executable_handle)? {
            // Refused above.
            Program::Recorded => Err(record_only::refusal("execute")),
            Program::Xla(program) => {
                let handle = request.loaded_executable_handle;
                let first = request.result_array_handle.is_empty();
                let asked = request.result_status_handle;
                let status_wanted = request
                    .execute_options
                    .as_ref()
                    .is_some_and(|o| o.fill_status);
                // Before it may be compiled again for workers that came back, which would give a deleted one a new life.
                program.check_not_deleted()?;
                let executed = match self.living(handle, Arc::clone(&program)).await {
                    Ok(living) => self.execute_xla(user_context, &living, request).await,
                    Err(lost) => Err(lost),
                };
                match executed {
                    Err(lost) if first && status::is_worker_lost(&lost) => {
                        let status_wanted = status_wanted.then_some(asked);
                        self.first_execution_lost(user_context, &program, status_wanted, lost)
                    }
                    executed => executed,
                }
            }
            Program::Plugin(program) => {
                self.execute_plugin_program(user_context, &program, request)
                    .await
            }
        }
    }

    /// Answers the first execution of a program, which wants to know what its results are, where a worker is lost: the
    /// results fail, as those of later executions do, and not the call. pathwaysutils looks for lost slices in this way.
    fn first_execution_lost(
        &mut self,
        context: &UserContext,
        program: &XlaProgram,
        status_handle: Option<u64>,
        lost: Status,
    ) -> Handled {
        let lost = status::with_user_context(lost, context.id());
        context.settled(&Err(lost.clone()));
        let failure = Failure {
            status: Arc::new(lost),
            context: context.clone(),
        };
        let mut outputs = Vec::with_capacity(program.results.len());
        for spec in &program.results {
            let handle = self.insert(None, Err(failure.clone()))?;
            outputs.push(output(spec, handle));
        }
        let status_handle = match status_handle {
            None => 0,
            Some(0) => self.future(Future::Ready(Err(failure))),
            Some(handle) => {
                lock(&self.tables.futures).insert(handle, Future::Ready(Err(failure)));
                handle
            }
        };
        Ok(Outcome::Now(Response::LoadedExecutableExecuteResponse(
            LoadedExecutableExecuteResponse {
                status_handle,
                outputs,
            },
        )))
    }

    async fn execute_xla(
        &mut self,
        user_context: &UserContext,
        program: &XlaProgram,
        request: LoadedExecutableExecuteRequest,
    ) -> Handled {
        Counters::add(&self.shared.counters.executes, 1);
        let handles = result_handles(
            &request.result_array_handle,
            program.results.len(),
            "Execute",
        )?;
        let options = request.execute_options.unwrap_or_default();
        user_context.has_one_outcome();
        let arguments = self.arguments(
            user_context,
            program,
            &request.args_handles,
            options.non_donatable_input_indices,
        )?;
        let devices = program.placement.devices.len();
        let num_results = program.results.len();
        let first_result = self.shared.ids.block((num_results * devices) as u64);
        let settles = user_context.wants_watch();
        let results = first_result..first_result + (num_results * devices) as u64;
        let foreseen = self.foresight.executes(results) && !options.fill_status && !settles;
        let watched = options.fill_status || settles || foreseen;
        let op = Execute {
            executable: program.id,
            // Numbered later (D2).
            launch: 0,
            placed_later: false,
            args: Vec::new(),
            first_result,
            non_donatable: arguments.non_donatable,
            user_context: user_context.id(),
            launch_id: options.launch_id,
            watch: 0,
            num_results: u32::try_from(num_results).unwrap_or(u32::MAX),
        };
        let ends = self
            .launch(
                &program.placement,
                op,
                arguments.shards,
                &arguments.needs,
                watched,
            )
            .await;
        let mut status_handle = 0;
        if foreseen {
            self.foresight.foreseen(ends);
        } else if watched {
            let context = user_context.clone();
            let done = async move {
                let outcome = link::all(ends).await;
                context.settled(&outcome);
                outcome
            };
            if options.fill_status {
                status_handle = if request.result_status_handle != 0 {
                    request.result_status_handle
                } else {
                    self.mint()
                };
                let future = Future::Pending {
                    result: Box::pin(done),
                    context: user_context.clone(),
                };
                lock(&self.tables.futures).insert(status_handle, future);
            } else {
                self.tasks.spawn(async move {
                    let _ = done.await;
                });
            }
        }
        // The first execution of a program comes without handles and wants to know what its results are.
        let describe = request.result_array_handle.is_empty();
        let mut outputs = Vec::new();
        for (index, (spec, handle)) in program.results.iter().zip(handles).enumerate() {
            let first = first_result + (index * devices) as u64;
            let placed = program.placement.devices.iter();
            let shards = placed
                .zip(program.placement.owning_links())
                .zip(first..)
                .map(|((&device, link), id)| {
                    let shard = Shard::new(id, device, Arc::clone(link), user_context);
                    Arc::new(shard.needing(&arguments.needs))
                })
                .collect();
            let array = Array::new(spec.dtype, spec.dims.clone(), spec.sharding.clone(), shards);
            let handle = self.insert(handle, Ok(array))?;
            if describe {
                outputs.push(output(spec, handle));
            }
        }
        for handle in arguments.donated {
            if let Some(Ok(array)) = self.values.get_mut(&handle) {
                array.delete();
            }
        }
        Ok(Outcome::Now(Response::LoadedExecutableExecuteResponse(
            LoadedExecutableExecuteResponse {
                status_handle,
                outputs,
            },
        )))
    }

    /// Sends an execution to the program's workers, to each its own devices' arguments. `args`: `[argument][device]`. What comes
    /// back tells the end of each part, if it is to be watched.
    async fn launch(
        &self,
        placement: &Placement,
        op: Execute,
        args: Vec<u64>,
        needs: &Needs,
        watched: bool,
    ) -> Vec<Answer> {
        let watch = || match watched {
            true => self.shared.ids.next(),
            false => 0,
        };
        if placement.spans() {
            let devices = placement.devices.len();
            let parts = placement.parts().iter().map(|part| {
                let own = |argument: &[u64]| {
                    let own = part.positions.iter();
                    own.map(|&position| argument[position]).collect::<Vec<_>>()
                };
                let op = Execute {
                    args: args.chunks_exact(devices).flat_map(own).collect(),
                    watch: watch(),
                    ..op.clone()
                };
                (Arc::clone(&part.link), op)
            });
            return launch_together(parts.collect(), needs.clone()).await;
        }
        let (link, watch) = (placement.first(), watch());
        let op = op::Op::Execute(Execute { args, watch, ..op });
        if watched {
            vec![link.call(watch, op).await]
        } else {
            link.send(op).await;
            Vec::new()
        }
    }

    fn arguments(
        &self,
        user_context: &UserContext,
        program: &XlaProgram,
        handles: &[u64],
        kept: Vec<i32>,
    ) -> Result<Arguments, Status> {
        let wanted = program.info.parameters.len();
        if handles.len() != wanted {
            return Err(status::invalid_argument(format!(
                "executable '{}' takes {wanted} arguments, {} were given",
                program.info.name,
                handles.len()
            )));
        }
        let mut arguments = Arguments {
            shards: Vec::with_capacity(wanted * program.placement.devices.len()),
            non_donatable: kept,
            donated: Vec::new(),
            needs: Needs::default(),
        };
        for (index, &handle) in handles.iter().enumerate() {
            let array = self.array(user_context, handle)?;
            if array.dtype == Dtype::Strings {
                return Err(status::invalid_argument(format!(
                    "argument {index} of executable '{}' is an array of strings; programs take arrays of numbers",
                    program.info.name
                )));
            }
            if array.shards.len() != program.placement.devices.len() {
                return Err(status::invalid_argument(format!(
                    "argument {index} of executable '{}' is on {} devices, the program runs on {}",
                    program.info.name,
                    array.shards.len(),
                    program.placement.devices.len()
                )));
            }
            for (shard, &device) in array.shards.iter().zip(&program.placement.devices) {
                // Nearly always in the program's order; a permuted mesh is looked up.
                let shard = if shard.device == device {
                    shard
                } else {
                    array.shards.iter().find(|s| s.device == device).ok_or_else(|| {
                        status::invalid_argument(format!(
                            "argument {index} of executable '{}' has no shard on device {device}",
                            program.info.name
                        ))
                    })?
                };
                arguments.shards.push(shard.id);
            }
            if array.shards.iter().any(|shard| !shard.needs.are_met()) {
                let all = array.shards.iter().map(|shard| &shard.needs);
                arguments.needs = Needs::of(all.chain([&arguments.needs]));
            }
            let number = i32::try_from(index).unwrap_or(i32::MAX);
            if is_donated(program, index) && !arguments.non_donatable.contains(&number) {
                // Another array that shares a shard must not lose it (D4): the program then works on a copy.
                if array
                    .shards
                    .iter()
                    .any(|shard| Arc::strong_count(shard) > 1)
                {
                    arguments.non_donatable.push(number);
                } else {
                    for saves in array.shards.iter().map(|shard| shard.saves_need()) {
                        if !saves.are_met() {
                            arguments.needs = Needs::of([&saves, &arguments.needs]);
                        }
                    }
                }
                arguments.donated.push(handle);
            }
        }
        arguments.non_donatable.sort_unstable();
        Ok(arguments)
    }
}

fn is_donated(program: &XlaProgram, index: usize) -> bool {
    u32::try_from(index).is_ok_and(|i| program.info.donated_parameters.binary_search(&i).is_ok())
}

/// One result as the first execution's reply describes it.
pub(super) fn output(spec: &ResultSpec, handle: u64) -> Output {
    Output {
        dtype: Some(convert::dtype(spec.dtype)),
        shape: Some(ShapeProto {
            version_number: 0,
            dims: spec.dims.clone(),
        }),
        sharding: Some(spec.sharding.to_proto()),
        array_handle: handle,
    }
}
