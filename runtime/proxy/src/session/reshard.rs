//! ReshardArrays: an array under another sharding, on other devices too. The proxy says which pieces go where; the workers move
//! them, each fetching from the others what it does not hold. No element passes here.

mod plan;

use std::sync::Arc;

use waystation_checkpoint::sharding::IndexDomain;
use waystation_proto::{
    waystation::worker::{Copy, Read, Region, Reshard, Target, op, reshard},
    xla::{
        PrimitiveType,
        ifrt::{
            proto::ArrayCopySemantics,
            proxy::{ReshardArraysRequest, ReshardArraysResponse, ifrt_response::Response},
        },
    },
};

use self::plan::{Gather, Make, Place};
use super::{
    Handled, Outcome, Session, UserContext,
    arrays::result_handles,
    copies::{ReleaseAtEnd, target},
};
use crate::{
    array::{Array, Shard},
    cluster::{Cluster, Device},
    convert::{self, Dtype, Sharding},
    needs::Needs,
    status::{self, Status},
};

impl Session {
    pub(super) async fn reshard_arrays(
        &mut self,
        context: &UserContext,
        request: ReshardArraysRequest,
    ) -> Handled {
        let given = &request.array_handles;
        let handles = result_handles(&request.result_handles, given.len(), "ReshardArrays")?;
        if request.array_specs.len() != given.len() {
            return Err(status::invalid_argument(format!(
                "ReshardArrays of {} arrays comes with {} specifications",
                given.len(),
                request.array_specs.len()
            )));
        }
        let semantics = request.copy_semantics();
        let mut made = Vec::with_capacity(given.len());
        for (&handle, spec) in given.iter().zip(&request.array_specs) {
            let array = self.array(context, handle)?.clone();
            let dims = convert::dims(spec.shape.as_ref())?;
            if dims != array.dims || convert::element_type(spec.dtype.as_ref())? != array.dtype {
                return Err(status::invalid_argument(format!(
                    "array {handle} of shape {:?} cannot become one of another type or of shape {dims:?} by ReshardArrays",
                    array.dims
                )));
            }
            let sharding = convert::sharding(spec.sharding.as_ref())?;
            made.push(self.reshard(context, &array, sharding, semantics).await?);
        }
        self.settle_now_and_then(context, &made).await;
        let mut array_handles = Vec::with_capacity(handles.len());
        for (array, handle) in made.into_iter().zip(handles) {
            array_handles.push(self.insert(handle, Ok(array))?);
        }
        if semantics == ArrayCopySemantics::DonateInput {
            self.donate(given);
        }
        Ok(Outcome::Now(Response::ReshardArraysResponse(
            ReshardArraysResponse { array_handles },
        )))
    }

    /// The array is the client's no more.
    pub(super) fn donate(&mut self, handles: &[u64]) {
        for handle in handles {
            if let Some(Ok(array)) = self.values.get_mut(handle) {
                array.delete();
            }
        }
    }

    /// A new array with the elements of an old one.
    pub(super) async fn reshard(
        &mut self,
        context: &UserContext,
        array: &Array,
        sharding: Sharding,
        semantics: ArrayCopySemantics,
    ) -> Result<Array, Status> {
        let cluster = Arc::clone(self.cluster()?);
        let from = places(&cluster, &array.sharding, &array.dims)?;
        let to = places(&cluster, &sharding, &array.dims)?;
        let Dtype::Numbers(dtype) = array.dtype else {
            return self.reshard_strings(context, array, sharding, &from, &to);
        };
        let plan = plan::plan(&from, &to)?;
        let may_share = semantics != ArrayCopySemantics::AlwaysCopy
            && sharding.memory_kind == array.sharding.memory_kind;
        let memory_kind = sharding.memory_kind.as_deref();
        let needs = Needs::of(array.shards.iter().map(|shard| &shard.needs));
        let mut shards = Vec::with_capacity(to.len());
        let mut targets: Vec<(usize, usize, Target)> = Vec::new();
        for (make, place) in plan.makes.iter().zip(&to) {
            if let Make::Same(source) = make
                && may_share
            {
                shards.push(Arc::clone(&array.shards[*source]));
                continue;
            }
            let device = device(&cluster, place.device)?;
            let link = Arc::clone(cluster.link(device));
            let shard =
                Shard::new(self.shared.ids.next(), device.id, link, context).needing(&needs);
            let target = target(&shard, device, memory_kind);
            match *make {
                Make::Same(source) | Make::Copy(source) => {
                    let copy = Copy {
                        source: array.shards[source].id,
                        target: Some(target),
                        user_context: context.id(),
                    };
                    shard.link.send(op::Op::Copy(copy)).await;
                }
                Make::Part(part) => targets.push((place.worker, part, target)),
            }
            shards.push(Arc::new(shard));
        }
        for (worker, gather) in plan.gathers {
            let mut parts: Vec<reshard::Part> = gather
                .parts
                .iter()
                .map(|domain| reshard::Part {
                    dims: domain.shape.clone(),
                    targets: Vec::new(),
                })
                .collect();
            for (_, part, target) in targets.iter().filter(|(at, ..)| *at == worker) {
                parts[*part].targets.push(target.clone());
            }
            let sources = gather;
            self.gather(context, &cluster, worker, array, dtype, parts, sources)
                .await;
        }
        Ok(Array::new(
            array.dtype,
            array.dims.clone(),
            sharding,
            shards,
        ))
    }

    #[expect(clippy::too_many_arguments, reason = "the pieces of one op")]
    async fn gather(
        &mut self,
        context: &UserContext,
        cluster: &Cluster,
        worker: usize,
        array: &Array,
        dtype: PrimitiveType,
        parts: Vec<reshard::Part>,
        gather: Gather,
    ) {
        let link = Arc::clone(&cluster.links[worker]);
        let mut releases = Vec::new();
        let mut sources = Vec::with_capacity(gather.sources.len());
        let needs = Needs::of(array.shards.iter().map(|shard| &shard.needs));
        if !needs.are_met() {
            for shard in &array.shards {
                shard.saved_with(&needs);
            }
        }
        for (position, pieces) in gather.sources {
            let shard = &array.shards[position];
            let pieces: Vec<reshard::Piece> = pieces
                .into_iter()
                .map(|piece| reshard::Piece {
                    region: Some(Region {
                        offset: piece.from,
                        size: piece.size,
                    }),
                    part: u32::try_from(piece.part).unwrap_or(u32::MAX),
                    offset: piece.to,
                })
                .collect();
            let from = if Arc::ptr_eq(&shard.link, &link) {
                reshard::source::From::Shard(shard.id)
            } else {
                let transfer = self.shared.ids.next();
                let read = Read {
                    transfer,
                    shard: shard.id,
                    regions: pieces.iter().filter_map(|p| p.region.clone()).collect(),
                    on_demand: true,
                    ..Read::default()
                };
                shard.link.send(op::Op::Read(read)).await;
                releases.push(ReleaseAtEnd::new(Arc::clone(&shard.link), transfer));
                reshard::source::From::Remote(reshard::Remote {
                    transfer,
                    from: shard.link.address.to_string(),
                    from_epoch: shard.link.epoch,
                })
            };
            sources.push(reshard::Source {
                from: Some(from),
                pieces,
            });
        }
        let request = self.shared.ids.next();
        let op = op::Op::Reshard(Reshard {
            request,
            dtype: dtype as i32,
            parts,
            sources,
            user_context: context.id(),
        });
        let answer = link.call(request, op).await;
        self.tasks.spawn(async move {
            // A failure has failed the shards; there is nobody else to tell.
            let _ = answer.wait().await;
            drop(releases);
        });
    }

    /// Strings are moved as whole shards only.
    fn reshard_strings(
        &self,
        context: &UserContext,
        array: &Array,
        sharding: Sharding,
        from: &[Place],
        to: &[Place],
    ) -> Result<Array, Status> {
        let mut shards = Vec::with_capacity(to.len());
        for target in to {
            let source = from.iter().position(|place| place.domain == target.domain);
            let source = source.ok_or_else(|| {
                status::unimplemented(
                    "ReshardArrays of an array of strings that cuts its shards otherwise",
                )
            })?;
            let strings = array.shards[source].strings()?.clone();
            shards.push(self.string_shard(target.device, context, strings)?);
        }
        Ok(Array::new(
            array.dtype,
            array.dims.clone(),
            sharding,
            shards,
        ))
    }
}

fn device(cluster: &Cluster, id: i32) -> Result<&Device, Status> {
    cluster
        .device(id)
        .ok_or_else(|| status::invalid_argument(format!("unknown device {id}")))
}

/// Who holds which elements of an array.
fn places(cluster: &Cluster, sharding: &Sharding, dims: &[i64]) -> Result<Vec<Place>, Status> {
    // More positions than devices would name one twice.
    let mut devices = sharding.devices.clone();
    devices.sort_unstable();
    if devices.windows(2).any(|pair| pair[0] == pair[1]) {
        return Err(status::invalid_argument(
            "the sharding names a device twice",
        ));
    }
    let domains: Vec<IndexDomain> = sharding.domains(dims)?;
    sharding
        .devices
        .iter()
        .zip(domains)
        .map(|(&id, domain)| {
            let device = device(cluster, id)?;
            Ok(Place {
                worker: device.link,
                device: id,
                domain,
            })
        })
        .collect()
}
