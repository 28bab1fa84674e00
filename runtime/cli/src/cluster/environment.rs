//! What the client's environment must say.

use std::ffi::OsString;

use super::Addresses;
use crate::large_transfers;

/// The variables that make a JAX process use this cluster.
pub(crate) fn variables(addresses: &Addresses) -> [(&'static str, OsString); 6] {
    let target = match &addresses.unix_socket {
        Some(name) => format!("grpc://unix-abstract:{name}"),
        None => format!("grpc://{}", addresses.proxy),
    };
    [
        ("JAX_PLATFORMS", "proxy".into()),
        ("JAX_BACKEND_TARGET", target.into()),
        // The word itself; without it jaxlib's client speaks ALTS.
        ("IFRT_PROXY_USE_INSECURE_GRPC_CREDENTIALS", "true".into()),
        // Checkpoints are written and read by the workers.
        ("ENABLE_PATHWAYS_PERSISTENCE", "1".into()),
        // Without a threshold, which is not set here, the client makes no use of it.
        (
            large_transfers::VARIABLE,
            addresses.large_transfers.clone().into(),
        ),
        (
            "WAYSTATION_STATUS_URL",
            format!("http://{}/status", addresses.status).into(),
        ),
    ]
}

/// The variables as lines for a shell.
pub(crate) fn exports(addresses: &Addresses) -> String {
    let lines = variables(addresses)
        .map(|(name, value)| format!("export {name}={}", quoted(&value.to_string_lossy())));
    lines.join("\n")
}

/// In quotes where a shell would see more than a word.
fn quoted(value: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "/._-:".contains(c);
    if value.chars().all(plain) {
        return value.to_owned();
    }
    format!("'{}'", value.replace('\'', "'\\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exports_are_shell_lines() {
        let mut addresses = Addresses {
            proxy: "127.0.0.1:7".parse().unwrap(),
            unix_socket: None,
            status: "127.0.0.1:8".parse().unwrap(),
            large_transfers: "/tmp/it's".into(),
        };
        assert_eq!(
            exports(&addresses),
            "export JAX_PLATFORMS=proxy\nexport JAX_BACKEND_TARGET=grpc://127.0.0.1:7\n\
             export IFRT_PROXY_USE_INSECURE_GRPC_CREDENTIALS=true\nexport ENABLE_PATHWAYS_PERSISTENCE=1\n\
             export IFRT_PROXY_GRPC_LARGE_TRANSFER_OPTIMIZATION_DIRECTORY='/tmp/it'\\''s'\n\
             export WAYSTATION_STATUS_URL=http://127.0.0.1:8/status"
        );
        addresses.unix_socket = Some("ws-1".to_owned());
        assert!(
            exports(&addresses).contains("export JAX_BACKEND_TARGET=grpc://unix-abstract:ws-1\n")
        );
    }
}
