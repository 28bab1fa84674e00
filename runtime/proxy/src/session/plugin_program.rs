//! Plugin programs: JSON texts that ask the backend itself for something. Served: the persistence programs, by which
//! workers write arrays to a checkpoint and read them from one, and resharding. The proxy only says who does what; no array
//! byte and nothing of the storage format passes here.

mod working;

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use futures::future::BoxFuture;
use tokio::sync::oneshot;
use waystation_checkpoint::{
    Error, Spread,
    persistence::{self, ReadItem, WriteItem},
    zarr::DType,
};
use waystation_proto::{
    waystation::worker::{
        ArrayFile, RestoreArrays, SaveArrays, Target, op, restore_arrays, save_arrays,
    },
    xla::{
        OpSharding, PrimitiveType,
        ifrt::{
            Serialized,
            proxy::{
                LoadedExecutableExecuteRequest, LoadedExecutableExecuteResponse,
                ifrt_response::Response, loaded_executable_execute_response::Output,
            },
        },
    },
};

use self::working::Working;
use super::{
    Future, Handled, Outcome, Session, UserContext,
    arrays::result_handles,
    execute::output,
    lock,
    programs::{Program, ResultSpec, plain_compile_response},
    reshard_program::{self, ReshardProgram},
};
use crate::{
    array::{Array, Shard},
    cluster::Cluster,
    convert::{Sharding, Tiling},
    needs::{Needs, Unmet},
    status::{self, Status},
};

/// What jaxlib puts before a plugin program's text.
const PREFIX: &[u8] = b"__serialized_plugin_program ";

/// A plugin program that has been understood.
pub(super) struct PluginProgram(Asked);

enum Asked {
    Write(Vec<WriteItem>),
    Read(Vec<ReadItem>),
    Reshard(ReshardProgram),
}

impl Asked {
    fn parse(text: &str) -> Result<Self, Status> {
        match persistence::parse(text) {
            Ok(persistence::Request::Write(items)) => Ok(Self::Write(items)),
            Ok(persistence::Request::Read(items)) => Ok(Self::Read(items)),
            Err(waystation_checkpoint::Error::UnsupportedPluginProgram { request })
                if request == reshard_program::NAME =>
            {
                ReshardProgram::parse(text).map(Self::Reshard)
            }
            Err(e) => Err(of_checkpoint(&e)),
        }
    }

    /// As many as an argument has shards, or the client refuses to execute.
    fn devices(&self) -> Vec<i32> {
        match self {
            Self::Write(items) => items.first().map(|i| i.device_ids.clone()),
            Self::Read(items) => items.first().map(|i| i.device_ids.clone()),
            Self::Reshard(program) => Some(program.devices()),
        }
        .unwrap_or_default()
    }
}

impl Session {
    pub(super) fn compile_plugin_program(&mut self, program: &Serialized) -> Handled {
        let text = program.data.strip_prefix(PREFIX).unwrap_or(&program.data);
        let text = std::str::from_utf8(text).map_err(|e| {
            status::invalid_argument(format!("Bad PluginProgram: the text is not UTF-8: {e}"))
        })?;
        let asked = Asked::parse(text)?;
        let devices = asked.devices();
        let cluster = self.cluster()?;
        if let Some(id) = devices.iter().find(|&&id| cluster.device(id).is_none()) {
            return Err(status::invalid_argument(format!(
                "Bad PluginProgram: unknown device {id}"
            )));
        }
        let (handle, ready) = (self.mint(), self.ready_future());
        let response = plain_compile_response(handle, ready, "plugin_program".to_owned(), &devices);
        lock(&self.tables.programs).insert(handle, Program::Plugin(Arc::new(PluginProgram(asked))));
        Ok(Outcome::Now(Response::CompileResponse(response)))
    }

    pub(super) async fn execute_plugin_program(
        &mut self,
        user_context: &UserContext,
        program: &PluginProgram,
        request: LoadedExecutableExecuteRequest,
    ) -> Handled {
        let wants_status = request
            .execute_options
            .as_ref()
            .is_some_and(|options| options.fill_status);
        let idle = || -> BoxFuture<'static, _> { Box::pin(std::future::ready(Ok(()))) };
        let (done, outputs): (BoxFuture<'static, _>, _) = match &program.0 {
            Asked::Write(items) => {
                result_handles(
                    &request.result_array_handle,
                    0,
                    "Execute of a persistence write",
                )?;
                let working = self
                    .save(user_context, items, &request.args_handles)
                    .await?;
                if wants_status {
                    (working.together(), Vec::new())
                } else {
                    working.let_be();
                    (idle(), Vec::new())
                }
            }
            Asked::Read(items) => {
                if !request.args_handles.is_empty() {
                    return Err(status::invalid_argument(
                        "a persistence read takes no arguments",
                    ));
                }
                let handles = result_handles(
                    &request.result_array_handle,
                    items.len(),
                    "Execute of a persistence read",
                )?;
                let (working, arrays) = self.restore(user_context, items).await?;
                let outputs = self.results(arrays, handles)?;
                if wants_status {
                    (self.go_on(working.each()), outputs)
                } else {
                    self.tasks.spawn(working.unasked());
                    (idle(), outputs)
                }
            }
            Asked::Reshard(program) => {
                let handles = result_handles(
                    &request.result_array_handle,
                    program.len(),
                    "Execute of a reshard program",
                )?;
                let arrays = self
                    .run_reshard_program(user_context, program, &request)
                    .await?;
                let ready = self.ready(&arrays).await;
                (Box::pin(ready), self.results(arrays, handles)?)
            }
        };
        let mut status_handle = 0;
        if wants_status {
            status_handle = if request.result_status_handle != 0 {
                request.result_status_handle
            } else {
                self.mint()
            };
            let future = Future::Pending {
                result: done,
                context: user_context.clone(),
            };
            lock(&self.tables.futures).insert(status_handle, future);
        }
        Ok(Outcome::Now(Response::LoadedExecutableExecuteResponse(
            LoadedExecutableExecuteResponse {
                status_handle,
                outputs,
            },
        )))
    }

    /// Has work go on whether or not the client ever asks for its end: others may wait for it.
    fn go_on(
        &mut self,
        work: BoxFuture<'static, Result<(), Status>>,
    ) -> BoxFuture<'static, Result<(), Status>> {
        let (sender, end) = oneshot::channel();
        self.tasks.spawn(async move {
            // Nobody may have asked.
            let _ = sender.send(work.await);
        });
        Box::pin(async move {
            let gone = |_| Err(status::failed_precondition("the session has ended"));
            end.await.unwrap_or_else(gone)
        })
    }

    /// Puts the results down and describes them.
    fn results(
        &mut self,
        arrays: Vec<Array>,
        handles: Vec<Option<u64>>,
    ) -> Result<Vec<Output>, Status> {
        let mut outputs = Vec::with_capacity(arrays.len());
        for (array, handle) in arrays.into_iter().zip(handles) {
            let spec = ResultSpec {
                dtype: array.numbers("the result of a plugin program")?,
                dims: array.dims.clone(),
                sharding: array.sharding.clone(),
            };
            outputs.push(output(&spec, self.insert(handle, Ok(array))?));
        }
        Ok(outputs)
    }

    /// Each worker is told of the shards that it holds.
    async fn save(
        &mut self,
        user_context: &UserContext,
        items: &[WriteItem],
        args: &[u64],
    ) -> Result<Working, Status> {
        if args.len() != items.len() {
            return Err(status::invalid_argument(format!(
                "Bad PluginProgram: {} arrays to write, {} arguments",
                items.len(),
                args.len()
            )));
        }
        let cluster = Arc::clone(self.cluster()?);
        let mut by_link: BTreeMap<usize, Vec<save_arrays::Item>> = BTreeMap::new();
        let mut spread = Spread::default();
        let mut one_way = None;
        let mut saved = Vec::new();
        for (item, &handle) in items.iter().zip(args) {
            let array = self.array(user_context, handle)?;
            if array.dims != item.dims || array.shards.len() != item.device_ids.len() {
                return Err(status::invalid_argument(format!(
                    "Bad PluginProgram: '{}' is written as shape {:?} over {} devices, the argument has shape {:?} over {}",
                    item.name,
                    item.dims,
                    item.device_ids.len(),
                    array.dims,
                    array.shards.len()
                )));
            }
            let file = array_file(
                &item.location,
                &item.name,
                &item.dims,
                &item.sharding,
                &item.device_ids,
                array.numbers("an array to save")?,
            );
            let dtype = array.numbers("an array to save")?;
            if !persistence::is_asked_for(dtype) {
                one_way.get_or_insert((&item.name, dtype));
            }
            let shares = shares(&mut spread, &cluster, item, dtype)?;
            let mut parts: BTreeMap<usize, save_arrays::Item> = BTreeMap::new();
            for ((position, &id), share) in (0u32..).zip(&item.device_ids).zip(shares) {
                let found = array.shards.iter().find(|shard| shard.device == id);
                let (Some(device), Some(shard)) = (cluster.device(id), found) else {
                    return Err(status::invalid_argument(format!(
                        "Bad PluginProgram: '{}' has no shard on device {id}",
                        item.name
                    )));
                };
                let part = parts
                    .entry(device.link)
                    .or_insert_with(|| save_arrays::Item {
                        file: Some(file.clone()),
                        // The worker of the first position.
                        writes_metadata: position == 0,
                        ..Default::default()
                    });
                part.shards.push(shard.id);
                saved.push((device.link, Arc::clone(shard)));
                part.positions.push(position);
                part.shares.push(share);
            }
            for (link, part) in parts {
                by_link.entry(link).or_default().push(part);
            }
        }
        let needs = Needs::of(saved.iter().map(|(_, shard)| &shard.needs));
        if !needs.are_met() {
            for (_, shard) in &saved {
                shard.saved_with(&needs);
            }
        }
        // A worker may have to wait for host memory before it copies them, behind other saves.
        let mut copying: BTreeMap<usize, (Needs, Unmet)> =
            by_link.keys().map(|&link| (link, Needs::one())).collect();
        for (link, shard) in &saved {
            if let Some((copied, _)) = copying.get(link) {
                shard.saved_with(copied);
            }
        }
        // Counted references that stay would have programs work on copies.
        drop(saved);
        if let Some((array, dtype)) = one_way {
            self.warn_of_save(array, dtype);
        }
        let timeout_ms = timeout_ms(items.iter().map(|i| i.timeout));
        let names: Vec<String> = by_link
            .keys()
            .map(|&link| cluster.links[link].name.to_string())
            .collect();
        let nonce = working::nonce();
        let mut working = Working::default();
        for (place, (link, items)) in (0u32..).zip(by_link) {
            let request = self.shared.ids.next();
            let together = (names.len() > 1).then(|| save_arrays::Together {
                nonce: nonce.clone(),
                place,
                names: names.clone(),
            });
            let op = op::Op::SaveArrays(SaveArrays {
                request,
                items,
                timeout_ms,
                user_context: user_context.id(),
                together,
            });
            let copied = copying.remove(&link);
            let link = &cluster.links[link];
            let answer = match copied {
                Some((_, copied)) => link.save(request, op, copied).await,
                None => link.call(request, op).await,
            };
            working.add(link, request, answer);
        }
        Ok(working)
    }

    /// Says once, in the log, that a save holds what its client cannot ask for.
    fn warn_of_save(&mut self, array: &str, dtype: PrimitiveType) {
        if std::mem::replace(&mut self.warned_of_saves, true) {
            return;
        }
        tracing::warn!(
            array,
            dtype = dtype.as_str_name(),
            "Orbax's client cannot ask for arrays of this type: a restore must go through plain Orbax, or through \
             `waystation checkpoint` (said once a session)"
        );
    }

    /// Makes the arrays; the workers fill them.
    async fn restore(
        &mut self,
        user_context: &UserContext,
        items: &[ReadItem],
    ) -> Result<(Working, Vec<Array>), Status> {
        let cluster = Arc::clone(self.cluster()?);
        let (needs, unmet) = Needs::one();
        let mut by_link: BTreeMap<usize, Vec<restore_arrays::Item>> = BTreeMap::new();
        let mut arrays = Vec::with_capacity(items.len());
        for item in items {
            let file = array_file(
                &item.location,
                &item.name,
                &item.dims,
                &item.sharding,
                &item.device_ids,
                item.dtype,
            );
            let mut parts: BTreeMap<usize, restore_arrays::Item> = BTreeMap::new();
            let mut shards = Vec::with_capacity(item.device_ids.len());
            for (position, &id) in (0u32..).zip(&item.device_ids) {
                let device = cluster.device(id).ok_or_else(|| {
                    status::invalid_argument(format!("Bad PluginProgram: unknown device {id}"))
                })?;
                let link = Arc::clone(cluster.link(device));
                let shard =
                    Shard::new(self.shared.ids.next(), id, link, user_context).needing(&needs);
                let part = parts
                    .entry(device.link)
                    .or_insert_with(|| restore_arrays::Item {
                        file: Some(file.clone()),
                        ..Default::default()
                    });
                part.targets.push(Target {
                    shard: shard.id,
                    device: device.ordinal,
                    memory_kind: String::new(),
                });
                part.positions.push(position);
                shards.push(Arc::new(shard));
            }
            for (link, part) in parts {
                by_link.entry(link).or_default().push(part);
            }
            let sharding = Sharding {
                devices: item.device_ids.clone(),
                memory_kind: None,
                tiling: Tiling::Op(Box::new(item.sharding.clone())),
            };
            arrays.push(Array::new(item.dtype, item.dims.clone(), sharding, shards));
        }
        let timeout_ms = timeout_ms(items.iter().map(|i| i.timeout));
        let mut working = Working::bringing(unmet);
        for (link, items) in by_link {
            let request = self.shared.ids.next();
            let op = op::Op::RestoreArrays(RestoreArrays {
                request,
                items,
                timeout_ms,
                user_context: user_context.id(),
            });
            let link = &cluster.links[link];
            working.add(link, request, link.call(request, op).await);
        }
        Ok((working, arrays))
    }
}

/// What each worker writes of the shard at each position. Devices that are not there have no share.
fn shares(
    spread: &mut Spread,
    cluster: &Cluster,
    item: &WriteItem,
    dtype: PrimitiveType,
) -> Result<Vec<save_arrays::Share>, Status> {
    if DType::of(dtype).is_none() {
        let array = item.name.clone();
        return Err(of_checkpoint(&Error::UnstorableDType { array, dtype }));
    }
    let devices = item.device_ids.iter().map(|&id| cluster.device(id));
    let workers: Vec<usize> = devices.map(|device| device.map_or(0, |d| d.link)).collect();
    let sharding =
        waystation_checkpoint::Sharding::new(&item.sharding, workers.len()).map_err(named(item))?;
    let shares = spread.shares(dtype, &item.dims, &sharding, &workers);
    let shares = shares.map_err(named(item))?.into_iter();
    Ok(shares
        .map(|share| save_arrays::Share {
            part: share.part,
            parts: share.parts,
        })
        .collect())
}

fn named(item: &WriteItem) -> impl Fn(waystation_checkpoint::Error) -> Status {
    |error| {
        let mut status = of_checkpoint(&error);
        status.message = format!("saving '{}': {}", item.name, status.message);
        status
    }
}

/// The checkpoint crate's error under its own code.
fn of_checkpoint(error: &waystation_checkpoint::Error) -> Status {
    Status {
        code: error.code() as i32,
        message: error.report(),
        payload: Default::default(),
    }
}

fn array_file(
    location: &str,
    name: &str,
    dims: &[i64],
    sharding: &OpSharding,
    device_ids: &[i32],
    dtype: PrimitiveType,
) -> ArrayFile {
    ArrayFile {
        location: location.to_owned(),
        name: name.to_owned(),
        dims: dims.to_vec(),
        sharding: Some(sharding.clone()),
        device_ids: device_ids.to_vec(),
        dtype: dtype as i32,
    }
}

/// The longest time that any item allows; 0 where none says.
fn timeout_ms(timeouts: impl Iterator<Item = Option<Duration>>) -> u64 {
    let longest = timeouts.flatten().max().unwrap_or_default();
    u64::try_from(longest.as_millis()).unwrap_or(u64::MAX)
}
