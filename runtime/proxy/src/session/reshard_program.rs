//! The plugin program `reshardRequest` of `pathwaysutils.experimental.reshard`: the same as ReshardArrays, said in JSON.

use base64::{Engine as _, prelude::BASE64_STANDARD};
use prost::Message as _;
use serde::Deserialize;
use waystation_proto::xla::{
    OpSharding,
    ifrt::{proto::ArrayCopySemantics, proxy::LoadedExecutableExecuteRequest},
};

use super::{Session, UserContext};
use crate::{
    array::Array,
    convert::{Sharding, Tiling},
    status::{self, Status},
};

/// The member of the program's object.
pub(super) const NAME: &str = "reshardRequest";

/// A program that has been understood.
pub(super) struct ReshardProgram {
    donate: bool,
    /// By argument.
    from: Vec<Sharding>,
    to: Vec<Sharding>,
}

#[derive(Deserialize)]
struct Text {
    #[serde(rename = "reshardRequest")]
    request: Request,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Request {
    #[serde(default)]
    donate_input: bool,
    in_sharding: Vec<OneSharding>,
    out_sharding: Vec<OneSharding>,
}

#[derive(Deserialize)]
struct OneSharding {
    devices: Devices,
    /// Base64 of a serialized `OpSharding`; empty for a replicated one.
    xla_hlo_sharding: String,
    memory_kind: Option<String>,
}

#[derive(Deserialize)]
struct Devices {
    device_ids: Vec<i32>,
}

fn bad(reason: impl std::fmt::Display) -> Status {
    status::invalid_argument(format!("Bad PluginProgram: {NAME}: {reason}"))
}

impl ReshardProgram {
    /// Reads the text of a program.
    pub(super) fn parse(text: &str) -> Result<Self, Status> {
        let Text { request } = serde_json::from_str(text).map_err(bad)?;
        if request.in_sharding.len() != request.out_sharding.len() {
            return Err(bad(format_args!(
                "{} shardings of arguments, {} of results",
                request.in_sharding.len(),
                request.out_sharding.len()
            )));
        }
        let shardings = |all: Vec<OneSharding>| -> Result<Vec<Sharding>, Status> {
            all.into_iter().map(sharding).collect()
        };
        Ok(Self {
            donate: request.donate_input,
            from: shardings(request.in_sharding)?,
            to: shardings(request.out_sharding)?,
        })
    }

    /// The devices that the client takes the program to run on: it wants as many as an argument has shards.
    pub(super) fn devices(&self) -> Vec<i32> {
        self.from
            .first()
            .map(|sharding| sharding.devices.clone())
            .unwrap_or_default()
    }

    /// The number of arguments, which is that of results.
    pub(super) fn len(&self) -> usize {
        self.from.len()
    }
}

fn sharding(one: OneSharding) -> Result<Sharding, Status> {
    let bytes = BASE64_STANDARD.decode(one.xla_hlo_sharding).map_err(bad)?;
    let op = OpSharding::decode(&bytes[..]).map_err(bad)?;
    if one.devices.device_ids.is_empty() {
        return Err(bad("a sharding over no device"));
    }
    Ok(Sharding {
        devices: one.devices.device_ids,
        memory_kind: one.memory_kind,
        tiling: Tiling::Op(Box::new(op)),
    })
}

impl Session {
    /// The arrays under their new shardings.
    pub(super) async fn run_reshard_program(
        &mut self,
        context: &UserContext,
        program: &ReshardProgram,
        request: &LoadedExecutableExecuteRequest,
    ) -> Result<Vec<Array>, Status> {
        let args = &request.args_handles;
        if args.len() != program.len() {
            return Err(bad(format_args!(
                "it is for {} arrays, {} are given",
                program.len(),
                args.len()
            )));
        }
        let semantics = match program.donate {
            true => ArrayCopySemantics::DonateInput,
            false => ArrayCopySemantics::AlwaysCopy,
        };
        let mut made = Vec::with_capacity(args.len());
        for ((&handle, from), to) in args.iter().zip(&program.from).zip(&program.to) {
            let array = self.array(context, handle)?.clone();
            if from.devices != array.sharding.devices {
                return Err(bad(format_args!(
                    "it takes an array on devices {:?}, the argument is on {:?}",
                    from.devices, array.sharding.devices
                )));
            }
            made.push(self.reshard(context, &array, to.clone(), semantics).await?);
        }
        if program.donate {
            self.donate(args);
        }
        Ok(made)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_is_read_as_pathwaysutils_writes_it() {
        // As json.dumps gives it: REPLICATED is the empty message.
        let text = r#"{"reshardRequest": {"donateInput": true, "inSharding": [{"devices": {"device_ids": [0, 1]},
            "xla_hlo_sharding": "", "memory_kind": "device"}], "outSharding": [{"devices": {"device_ids": [2]},
            "xla_hlo_sharding": ""}]}}"#;
        let program = ReshardProgram::parse(text).expect("well-formed");
        assert!(program.donate);
        assert_eq!((program.len(), program.devices()), (1, vec![0, 1]));
        assert_eq!(program.from[0].memory_kind.as_deref(), Some("device"));
        assert_eq!(program.to[0].devices, [2]);
        for bad in [
            "{}",
            r#"{"reshardRequest": {}}"#,
            r#"{"reshardRequest": {"inSharding": [], "outSharding": [{"devices": {"device_ids": [1]}, "xla_hlo_sharding": ""}]}}"#,
            r#"{"reshardRequest": {"inSharding": [{"devices": {"device_ids": []}, "xla_hlo_sharding": ""}], "outSharding": []}}"#,
            r#"{"reshardRequest": {"inSharding": [{"devices": {"device_ids": [1]}, "xla_hlo_sharding": "!"}], "outSharding": []}}"#,
        ] {
            let status = ReshardProgram::parse(bad).err().expect(bad);
            assert!(
                status.message.contains("Bad PluginProgram"),
                "{}",
                status.message
            );
        }
    }
}
