//! Which protocol and serialization versions are spoken with a client.
//!
//! An answer outside the client's own range aborts its process, so a client without an overlap gets a gRPC error that
//! names both sides instead (protocol facts: GetVersion).

use waystation_proto::xla::ifrt::proxy::{GrpcGetVersionRequest, IfrtProxyVersion};

/// Oldest and newest jaxlib that is served.
pub const JAXLIB: [&str; 2] = ["0.8.3", "0.12.0.1"];
/// Oldest and newest protocol version served ([`JAXLIB`] offer 15..22 and 16..25).
pub(crate) const PROTOCOL: std::ops::RangeInclusive<i32> = 15..=25;
/// Oldest and newest version of IFRT's serialization served.
pub(crate) const SERDES: std::ops::RangeInclusive<i32> = 0..=6;

/// Picks the newest version both know.
///
/// # Errors
/// `FAILED_PRECONDITION` naming both ranges where they do not meet.
pub(crate) fn negotiate(
    request: &GrpcGetVersionRequest,
) -> Result<IfrtProxyVersion, tonic::Status> {
    let min = request.min_version.unwrap_or_default();
    let max = request.max_version.unwrap_or_default();
    let protocol = pick(
        "protocol",
        min.protocol_version,
        max.protocol_version,
        &PROTOCOL,
    )?;
    let serdes = pick(
        "serialization",
        min.ifrt_serdes_version_number,
        max.ifrt_serdes_version_number,
        &SERDES,
    )?;
    Ok(IfrtProxyVersion {
        protocol_version: protocol,
        ifrt_serdes_version_number: serdes,
    })
}

fn pick(
    what: &str,
    min: i32,
    max: i32,
    ours: &std::ops::RangeInclusive<i32>,
) -> Result<i32, tonic::Status> {
    let chosen = max.min(*ours.end());
    if chosen < min || chosen < *ours.start() {
        return Err(tonic::Status::failed_precondition(format!(
            "the client speaks IFRT {what} versions {min} to {max}, this Waystation speaks {} to {}; use jaxlib {} to {}, or a \
             Waystation made for your jaxlib",
            ours.start(),
            ours.end(),
            JAXLIB[0],
            JAXLIB[1],
        )));
    }
    Ok(chosen)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ask(p: (i32, i32), s: (i32, i32)) -> Result<(i32, i32), String> {
        let version = |protocol_version, ifrt_serdes_version_number| {
            Some(IfrtProxyVersion {
                protocol_version,
                ifrt_serdes_version_number,
            })
        };
        negotiate(&GrpcGetVersionRequest {
            min_version: version(p.0, s.0),
            max_version: version(p.1, s.1),
        })
        .map(|v| (v.protocol_version, v.ifrt_serdes_version_number))
        .map_err(|e| e.message().to_owned())
    }

    #[test]
    fn each_known_jaxlib_gets_the_newest_of_its_range() {
        assert_eq!(ask((15, 22), (0, 0)), Ok((22, 0)));
        assert_eq!(ask((16, 25), (0, 1)), Ok((25, 1)));
        assert_eq!(ask((16, 25), (0, 3)), Ok((25, 3)));
        assert_eq!(ask((16, 25), (2, 6)), Ok((25, 6)));
        assert_eq!(ask((20, 30), (4, 9)), Ok((25, 6)));
    }

    #[test]
    fn no_overlap_is_refused_with_both_ranges_named() {
        for (p, s) in [
            ((26, 30), (0, 6)),
            ((3, 14), (0, 0)),
            ((16, 25), (7, 9)),
            ((20, 18), (0, 6)),
        ] {
            let message = ask(p, s).expect_err("must be refused");
            assert!(
                message.contains("versions")
                    && message.contains("to 25") | message.contains("to 6"),
                "{message}"
            );
        }
    }
}
