//! The worker's life at the resource manager: Hello, then a beat each second; dials again when the stream breaks.

use std::{sync::Arc, time::Duration};

use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use waystation_pjrt::{Client, OptionValue};
use waystation_proto::{
    waystation::scheduler::{
        Beat, Hello, Leaving, WorkerInventory, WorkerOrder, WorkerReport,
        resource_manager_client::ResourceManagerClient, worker_inventory, worker_report::Report,
    },
    xla::ifrt::{AttributeMapProto, attribute_map_proto},
};

use crate::{config::Simulated, lease::Epochs, manager};

const BEAT: Duration = Duration::from_secs(1);
const FIRST_RETRY: Duration = Duration::from_millis(100);
/// Unless the lease is short: a worker must be back before it ends.
const LAST_RETRY: Duration = Duration::from_secs(3);

/// How long a worker that leaves waits for the resource manager to take note.
const FAREWELL: Duration = Duration::from_secs(1);

/// Stays registered until the token is cancelled; says so then, at once. `epochs`: of the proxies that are served. `numbered` hears
/// under which number clients know the first device.
pub(crate) async fn stay_registered(
    address: String,
    mut hello: Hello,
    epochs: Arc<Epochs>,
    stop: CancellationToken,
    numbered: impl Fn(i32),
) {
    let mut pause = FIRST_RETRY;
    let mut last_retry = LAST_RETRY;
    while !stop.is_cancelled() {
        hello.lease_epoch = epochs.now();
        hello.last_epoch = epochs.last();
        let mut ordered = None;
        let registered = register(&address, &hello, &epochs, &stop, &mut ordered, &numbered).await;
        if let Some(order) = ordered {
            hello.again = true;
            pause = FIRST_RETRY;
            last_retry = last_retry_of(&order);
        }
        match registered {
            Ok(()) => tracing::info!(
                resource_manager = address,
                "the resource manager closed the registration"
            ),
            Err(error) => {
                tracing::warn!(resource_manager = address, %error, "not registered; dialling again");
            }
        }
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(pause) => {}
        }
        pause = (pause * 2).min(last_retry);
    }
}

fn last_retry_of(order: &WorkerOrder) -> Duration {
    match order.lease_ms {
        0 => LAST_RETRY,
        lease => LAST_RETRY.min(Duration::from_millis(lease.into()) / 8),
    }
}

async fn register(
    address: &str,
    hello: &Hello,
    epochs: &Epochs,
    stop: &CancellationToken,
    ordered: &mut Option<WorkerOrder>,
    numbered: &impl Fn(i32),
) -> Result<(), tonic::Status> {
    let channel = tokio::select! {
        () = stop.cancelled() => return Ok(()),
        channel = manager::connect(address) => channel?,
    };
    let (reports, receiver) = mpsc::channel(4);
    let report = |report| WorkerReport {
        report: Some(report),
    };
    // The channel is new and has room.
    let _ = reports.send(report(Report::Hello(hello.clone()))).await;
    let beats = async move {
        let mut tick = tokio::time::interval(BEAT);
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Skip);
        loop {
            tokio::select! {
                _ = tick.tick() => {}
                () = stop.cancelled() => {
                    let _ = reports.send(report(Report::Leaving(Leaving {}))).await;
                    tokio::time::sleep(FAREWELL).await;
                    return;
                }
            }
            let lease_epoch = epochs.now();
            if reports
                .send(report(Report::Beat(Beat { lease_epoch })))
                .await
                .is_err()
            {
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
            tracing::info!(first_device_id = order.first_device_id, "registered");
            numbered(order.first_device_id);
            *ordered = Some(order);
        }
        Ok(())
    };
    tokio::select! {
        ended = listen => ended.or_else(|error| match stop.is_cancelled() {
            // It has taken note.
            true => Ok(()),
            false => Err(error),
        }),
        () = beats => Ok(()),
    }
}

/// What a program compiled on this machine may ask of the processor that runs it; empty where a plugin's devices are not the
/// processor.
pub(crate) fn cpu_features(client: &Client) -> String {
    if client.platform_name() != "cpu" {
        return String::new();
    }
    let facts = waystation_cache::platform::cpu();
    let wanted = |name: &str| {
        let fact = facts.iter().find(|(known, _)| known == name);
        fact.map_or_else(String::new, |(_, value)| value.clone())
    };
    format!("{},{}", wanted("cpu_arch"), wanted("cpu_features"))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_worker_tries_again_several_times_a_lease() {
        let told = |lease_ms| {
            last_retry_of(&WorkerOrder {
                lease_ms,
                ..WorkerOrder::default()
            })
        };
        assert_eq!(told(60_000), LAST_RETRY);
        assert_eq!(told(2_000), Duration::from_millis(250));
        assert_eq!(told(0), LAST_RETRY);
    }
}
