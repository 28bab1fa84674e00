//! One execution on its way to the plugin: what it takes over, what it needs of the devices, and the call.

use std::{rc::Rc, sync::Arc};

use waystation_pjrt::{Buffer, ExecuteOptions, Execution};
use waystation_proto::{tensorflow::StatusProto, waystation::worker::Execute};

use super::{program::Loaded, span::Part};
use crate::{
    ledger::Ask,
    status,
    table::{Held, Shard, Slot},
    usage::Cause,
    window::Permit,
};

/// An execution on its way to the plugin.
pub(super) struct Launch {
    pub(super) loaded: Arc<Loaded>,
    /// Local ordinals of its devices here, in logical order.
    pub(super) ordinals: Arc<[usize]>,
    /// Set if other workers have parts of it.
    pub(super) part: Option<Part>,
    /// [argument][device]. Held until it has started: a later one, which may start before it, must not take them over.
    pub(super) args: Held,
    /// [result][device].
    pub(super) results: Vec<Rc<Slot>>,
    /// Inputs that the client keeps.
    pub(super) kept: Vec<i64>,
    pub(super) launch_id: i32,
    pub(super) cause: Cause,
    pub(super) watch: u64,
    /// Held while nothing from outside is needed: it bounds what the stream may pile up here.
    pub(super) _permit: Option<Permit>,
}

impl Launch {
    /// Parameters that the plugin must not take over: the client's, and those that an op which came earlier still waits to
    /// read.
    pub(super) fn all_kept(&self) -> Vec<i64> {
        let devices = self.ordinals.len();
        let mut kept = self.kept.clone();
        self.args.beside(|args| {
            for parameter in self.loaded.donated(&[]) {
                let held = args
                    .iter()
                    .skip(parameter * devices)
                    .take(devices)
                    .any(|slot| slot.is_held());
                if held && let Ok(index) = i64::try_from(parameter) {
                    kept.push(index);
                }
            }
        });
        kept.sort_unstable();
        kept.dedup();
        kept
    }

    /// Those that the plugin could take over if they were not being sent, or copied.
    pub(super) fn sent(&self) -> Vec<Rc<Slot>> {
        let devices = self.ordinals.len();
        let kept = |parameter: &usize| {
            i64::try_from(*parameter).is_ok_and(|index| self.kept.contains(&index))
        };
        let own = self
            .loaded
            .donated(&[])
            .filter(|parameter| !kept(parameter));
        let own =
            own.flat_map(|parameter| self.args.iter().skip(parameter * devices).take(devices));
        own.filter(|slot| slot.is_being_sent()).cloned().collect()
    }

    /// The shards that the plugin takes over, with the place of their device in the program's list.
    pub(super) fn donated<'a>(
        &'a self,
        kept: &'a [i64],
        shards: &'a [Rc<Shard>],
    ) -> impl Iterator<Item = (usize, &'a Rc<Shard>)> + 'a {
        let devices = self.ordinals.len();
        self.loaded
            .donated(&[])
            .filter(|&parameter| {
                !i64::try_from(parameter).is_ok_and(|index| kept.binary_search(&index).is_ok())
            })
            .flat_map(move |parameter| {
                let own = shards.iter().skip(parameter * devices).take(devices);
                own.enumerate()
            })
    }

    /// What each device must have beside what the donated inputs give.
    pub(super) fn asks(&self, kept: &[i64], shards: &[Rc<Shard>]) -> Vec<Ask> {
        let need = self
            .loaded
            .results_need()
            .saturating_add(self.loaded.temporaries_need());
        let mut asks: Vec<Ask> = self
            .ordinals
            .iter()
            .map(|&device| Ask {
                device,
                bytes: need,
            })
            .collect();
        for (device, shard) in self.donated(kept, shards) {
            if let (Some(ask), Some((_, bytes))) = (asks.get_mut(device), shard.charged()) {
                ask.bytes = ask.bytes.saturating_sub(bytes);
            }
        }
        asks
    }

    pub(super) fn run(
        &self,
        kept: &[i64],
        shards: &[Rc<Shard>],
    ) -> Result<Execution, waystation_pjrt::Error> {
        let devices = self.ordinals.len();
        let args: Vec<Vec<&Buffer>> = (0..devices)
            .map(|device| self.args_of(device, shards).collect())
            .collect();
        self.loaded.executable.execute(&args, &self.options(kept))
    }

    /// The arguments of a device, by its place in the launch's list.
    pub(super) fn args_of<'a>(
        &self,
        device: usize,
        shards: &'a [Rc<Shard>],
    ) -> impl Iterator<Item = &'a Buffer> + use<'a> {
        let devices = self.ordinals.len();
        let own = shards.iter().skip(device).step_by(devices.max(1));
        own.map(|shard| &shard.buffer)
    }

    pub(super) fn options(&self, kept: &[i64]) -> ExecuteOptions {
        ExecuteOptions {
            launch_id: self.launch_id,
            non_donatable: kept.to_vec(),
        }
    }
}

/// The shards that an execution takes over and a save is to copy. `args`: [argument][device].
pub(super) fn saved(
    args: &[Rc<Slot>],
    donated: impl Iterator<Item = usize>,
    devices: usize,
) -> Vec<Rc<Slot>> {
    let own = donated.flat_map(|parameter| {
        let start = parameter.saturating_mul(devices);
        args.iter().skip(start).take(devices)
    });
    own.filter(|slot| slot.is_being_saved()).cloned().collect()
}

/// Whether the op's counts are those of the program.
pub(super) fn fits(op: &Execute, loaded: &Loaded, devices: usize) -> Result<(), StatusProto> {
    let (parameters, results) = (
        loaded.info.parameters.len(),
        loaded.executable.num_outputs(),
    );
    if usize::try_from(op.num_results).ok() != Some(results) {
        return Err(status::invalid(format!(
            "executable {} ({}) has {results} results, {} were asked for",
            op.executable, loaded.info.name, op.num_results
        )));
    }
    if parameters.checked_mul(devices) != Some(op.args.len()) {
        return Err(status::invalid(format!(
            "executable {} ({}) takes {parameters} arguments on {devices} devices, {} shards came",
            op.executable,
            loaded.info.name,
            op.args.len()
        )));
    }
    Ok(())
}
