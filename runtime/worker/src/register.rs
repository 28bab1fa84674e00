//! The worker's life at the resource manager: Hello, then a beat each second; dials again when the stream breaks.

use std::time::Duration;

use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use waystation_pjrt::{Client, OptionValue};
use waystation_proto::{
    waystation::scheduler::{
        Beat, Hello, WorkerInventory, WorkerReport, resource_manager_client::ResourceManagerClient,
        worker_inventory, worker_report,
    },
    xla::ifrt::{AttributeMapProto, attribute_map_proto},
};

use crate::{config::Simulated, peers};

const BEAT: Duration = Duration::from_secs(1);
const FIRST_RETRY: Duration = Duration::from_millis(100);
const LAST_RETRY: Duration = Duration::from_secs(3);

/// Stays registered until the token is cancelled.
pub(crate) async fn stay_registered(address: String, hello: Hello, stop: CancellationToken) {
    let mut pause = FIRST_RETRY;
    loop {
        let ended = tokio::select! {
            () = stop.cancelled() => return,
            ended = register(&address, &hello, &mut pause) => ended,
        };
        match ended {
            Ok(()) => tracing::warn!(
                resource_manager = address,
                "the resource manager closed the registration; dialling again"
            ),
            Err(error) => {
                tracing::warn!(resource_manager = address, %error, "not registered; dialling again")
            }
        }
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(pause) => {}
        }
        pause = (pause * 2).min(LAST_RETRY);
    }
}

async fn register(address: &str, hello: &Hello, pause: &mut Duration) -> Result<(), tonic::Status> {
    let channel = peers::endpoint(address)
        .map_err(|error| {
            tonic::Status::invalid_argument(format!("{address:?} is no address: {error}"))
        })?
        .connect()
        .await
        .map_err(|error| tonic::Status::unavailable(format!("no connection: {error}")))?;
    let (reports, receiver) = mpsc::channel(4);
    let first = WorkerReport {
        report: Some(worker_report::Report::Hello(hello.clone())),
    };
    // The channel is new and has room.
    let _ = reports.send(first).await;
    let beats = async move {
        let mut tick = tokio::time::interval(BEAT);
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Skip);
        loop {
            tick.tick().await;
            let beat = WorkerReport {
                report: Some(worker_report::Report::Beat(Beat {})),
            };
            if reports.send(beat).await.is_err() {
                // The stream is gone; its other half says why.
                std::future::pending::<()>().await;
            }
        }
    };
    let listen = async move {
        let mut client = ResourceManagerClient::new(channel);
        let mut orders = client
            .register(ReceiverStream::new(receiver))
            .await?
            .into_inner();
        while let Some(order) = orders.message().await? {
            *pause = FIRST_RETRY;
            tracing::info!(first_device_id = order.first_device_id, "registered");
        }
        Ok(())
    };
    tokio::select! {
        ended = listen => ended,
        () = beats => Ok(()),
    }
}

/// What the client shows, and what its devices stand in for.
pub(crate) fn inventory(
    client: &Client,
    plugin_digest: String,
    simulated: Option<Simulated>,
) -> WorkerInventory {
    let simulated = simulated.unwrap_or_else(|| Simulated {
        instance_type: String::new(),
        attributes: Vec::new(),
    });
    let devices = client
        .devices()
        .iter()
        .zip(
            simulated
                .attributes
                .iter()
                .map(Some)
                .chain(std::iter::repeat(None)),
        )
        .map(|(device, more)| worker_inventory::Device {
            device_kind: device.kind().to_owned(),
            debug_string: device.debug_string().to_owned(),
            to_string: device.to_string().to_owned(),
            attributes: Some(attributes(
                device.attributes().iter().chain(more.into_iter().flatten()),
            )),
            memories: device
                .memories()
                .iter()
                .map(|memory| worker_inventory::Memory {
                    kind: memory.kind().to_owned(),
                    debug_string: memory.debug_string().to_owned(),
                    to_string: memory.to_string().to_owned(),
                })
                .collect(),
            default_memory: u32::try_from(device.default_memory()).unwrap_or_default(),
        })
        .collect();
    WorkerInventory {
        platform_name: client.platform_name().to_owned(),
        platform_version: client.platform_version().to_owned(),
        devices,
        plugin_digest,
        simulated: simulated.instance_type,
    }
}

fn attributes<'a>(
    attributes: impl IntoIterator<Item = &'a (String, OptionValue)>,
) -> AttributeMapProto {
    let mut map = AttributeMapProto::default();
    for (name, value) in attributes {
        use attribute_map_proto::value::Value;
        let value = match value {
            OptionValue::String(value) => Value::StringValue(value.clone().into()),
            OptionValue::Int64(value) => Value::Int64Value(*value),
            OptionValue::Int64List(elements) => {
                Value::Int64ListValue(attribute_map_proto::value::Int64List {
                    elements: elements.clone(),
                })
            }
            OptionValue::Float(value) => Value::FloatValue(*value),
            OptionValue::Bool(value) => Value::BoolValue(*value),
        };
        map.attributes.insert(
            name.clone(),
            attribute_map_proto::Value { value: Some(value) },
        );
    }
    map
}
