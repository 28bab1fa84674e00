//! What the client's environment must say.

use super::Addresses;

/// The variables that make a JAX process use this cluster.
pub(crate) fn variables(addresses: Addresses) -> [(&'static str, String); 5] {
    [
        ("JAX_PLATFORMS", "proxy".to_owned()),
        ("JAX_BACKEND_TARGET", format!("grpc://{}", addresses.proxy)),
        // The word itself; without it jaxlib's client speaks ALTS.
        (
            "IFRT_PROXY_USE_INSECURE_GRPC_CREDENTIALS",
            "true".to_owned(),
        ),
        // Checkpoints are written and read by the workers.
        ("ENABLE_PATHWAYS_PERSISTENCE", "1".to_owned()),
        (
            "WAYSTATION_STATUS_URL",
            format!("http://{}/status", addresses.status),
        ),
    ]
}

/// The variables as lines for a shell. The values need no quotes: they are words, numbers and URLs without specials.
pub(crate) fn exports(addresses: Addresses) -> String {
    let lines = variables(addresses).map(|(name, value)| format!("export {name}={value}"));
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exports_are_shell_lines() {
        let addresses = Addresses {
            proxy: "127.0.0.1:7".parse().unwrap(),
            status: "127.0.0.1:8".parse().unwrap(),
        };
        assert_eq!(
            exports(addresses),
            "export JAX_PLATFORMS=proxy\nexport JAX_BACKEND_TARGET=grpc://127.0.0.1:7\n\
             export IFRT_PROXY_USE_INSECURE_GRPC_CREDENTIALS=true\nexport ENABLE_PATHWAYS_PERSISTENCE=1\n\
             export WAYSTATION_STATUS_URL=http://127.0.0.1:8/status"
        );
    }
}
