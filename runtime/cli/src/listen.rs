//! Ports, and the file that says which one was taken.

use std::{
    io::{self, Write as _},
    net::{IpAddr, SocketAddr, TcpListener, UdpSocket},
    os::{linux::net::SocketAddrExt as _, unix::net},
    path::Path,
};

use crate::error::{Failure, chain};

/// `HOST:PORT`, with an IPv6 address in brackets. The host is not looked up: it may not be there yet.
///
/// # Errors
/// A text for the user.
pub(crate) fn parse_host_port(text: &str) -> Result<String, String> {
    let wrong = || format!("{text:?} is no address: write HOST:PORT, as in 10.0.0.7:29001");
    let (host, port) = text.trim().rsplit_once(':').ok_or_else(wrong)?;
    let bare_v6 = host.contains(':') && !(host.starts_with('[') && host.ends_with(']'));
    let odd = host.is_empty() || host.contains(|c: char| c.is_whitespace() || c == '/');
    let port = port.parse::<u16>().unwrap_or_default();
    if bare_v6 || odd || port == 0 {
        return Err(wrong());
    }
    Ok(text.trim().to_owned())
}

/// Binds `port` of `host`; 0 takes a free one. `flag` is named to the user when the port is taken.
///
/// # Errors
/// [`Failure::usage`] when the port cannot be had.
pub(crate) fn bind(host: IpAddr, port: u16, flag: &str) -> Result<TcpListener, Failure> {
    TcpListener::bind(SocketAddr::new(host, port)).map_err(|error| {
        Failure::usage(match error.kind() {
            io::ErrorKind::AddrInUse => {
                format!("port {port} is in use: stop the process that has it, or give another {flag} (0 takes a free port)")
            }
            io::ErrorKind::PermissionDenied => {
                format!("port {port} needs more rights than this user has: give a {flag} above 1023")
            }
            _ => format!("cannot listen on {host} port {port} ({error}): give another --bind_address or {flag}"),
        })
    })
}

/// The name of an abstract Unix socket, as it can stand in a URL.
///
/// # Errors
/// A text for the user.
pub(crate) fn parse_socket_name(text: &str) -> Result<String, String> {
    let fine = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    if text.is_empty() || text.len() > 100 || !text.chars().all(fine) {
        return Err("write up to 100 letters, digits, - _ and .".to_owned());
    }
    Ok(text.to_owned())
}

/// Binds an abstract Unix socket. `flag` is named to the user when the name is taken.
///
/// # Errors
/// [`Failure::usage`] when the socket cannot be had.
pub(crate) fn bind_abstract(name: &str, flag: &str) -> Result<net::UnixListener, Failure> {
    let bound = net::SocketAddr::from_abstract_name(name)
        .and_then(|address| net::UnixListener::bind_addr(&address));
    bound.map_err(|error| {
        Failure::usage(match error.kind() {
            io::ErrorKind::AddrInUse => {
                format!("the abstract Unix socket {name} is in use: give another {flag}")
            }
            _ => format!(
                "cannot listen on the abstract Unix socket {name} ({error}): give another {flag}"
            ),
        })
    })
}

/// The bound address.
///
/// # Errors
/// When the system does not tell it.
pub(crate) fn address(listener: &TcpListener) -> Result<SocketAddr, Failure> {
    listener
        .local_addr()
        .map_err(|error| Failure::because("the bound address cannot be read", &error))
}

/// Writes one address a line, as a whole: a reader sees no file, or a complete one.
///
/// # Errors
/// [`Failure::usage`] when the file cannot be written.
pub(crate) fn write_ready_file(path: &Path, addresses: &[SocketAddr]) -> Result<(), Failure> {
    let write = || -> io::Result<()> {
        let folder = path
            .parent()
            .filter(|folder| !folder.as_os_str().is_empty())
            .unwrap_or(Path::new("."));
        let mut file = tempfile::NamedTempFile::new_in(folder)?;
        for address in addresses {
            writeln!(file, "{address}")?;
        }
        file.persist(path)?;
        Ok(())
    };
    write().map_err(|error| {
        Failure::usage(format!(
            "--ready_file {} cannot be written: {}",
            path.display(),
            chain(&error)
        ))
    })
}

/// The address under which others reach a listener: its own, or, when it listens on all addresses, the one that this
/// machine has towards `peer` ("host:port").
pub(crate) fn reachable(bound: SocketAddr, peer: &str) -> SocketAddr {
    if !bound.ip().is_unspecified() {
        return bound;
    }
    // Connecting a UDP socket sends nothing; it makes the system choose the local address of the route.
    let route = || {
        let socket = UdpSocket::bind((bound.ip(), 0))?;
        socket.connect(peer)?;
        socket.local_addr()
    };
    let ip = route().map_or(IpAddr::from([127, 0, 0, 1]), |local| local.ip());
    SocketAddr::new(ip, bound.port())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::USAGE;

    #[test]
    fn a_port_in_use_is_the_users_to_mend() {
        let taken = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = taken.local_addr().unwrap().port();
        let failure = bind(IpAddr::from([127, 0, 0, 1]), port, "--server_port").unwrap_err();
        assert_eq!(failure.status, USAGE);
        assert!(
            failure.message.contains(&format!("port {port} is in use")),
            "{failure}"
        );
        assert!(failure.message.contains("--server_port"), "{failure}");
    }

    #[test]
    fn an_abstract_socket_can_be_bound_once() {
        let name = format!("waystation-test-{}", std::process::id());
        assert_eq!(parse_socket_name(&name).as_deref(), Ok(name.as_str()));
        let taken = bind_abstract(&name, "--unix_socket").unwrap();
        let failure = bind_abstract(&name, "--unix_socket").unwrap_err();
        assert_eq!(failure.status, USAGE);
        assert!(failure.message.contains("is in use"), "{failure}");
        drop(taken);
        bind_abstract(&name, "--unix_socket").unwrap();
        for name in ["", "a/b", "a b", "ü", &"x".repeat(101)] {
            assert!(parse_socket_name(name).is_err(), "{name}");
        }
    }

    #[test]
    fn the_ready_file_has_one_address_a_line() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("ready");
        let addresses = [
            "127.0.0.1:7".parse().unwrap(),
            "127.0.0.1:8".parse().unwrap(),
        ];
        write_ready_file(&path, &addresses).unwrap();
        assert_eq!(
            std::fs::read_to_string(&path).unwrap(),
            "127.0.0.1:7\n127.0.0.1:8\n"
        );
        let failure = write_ready_file(&folder.path().join("no/such"), &addresses).unwrap_err();
        assert_eq!(failure.status, USAGE);
    }

    #[test]
    fn addresses_have_a_host_and_a_port() {
        for text in ["head:29001", "10.0.0.1:1", "[::1]:29001", "a.b-c.svc:65535"] {
            assert_eq!(parse_host_port(text).as_deref(), Ok(text));
        }
        for text in [
            "",
            "head",
            "head:",
            ":1",
            "head:0",
            "head:70000",
            "::1:29001",
            "grpc://head:1",
            "a b:1",
        ] {
            assert!(
                parse_host_port(text).unwrap_err().contains("HOST:PORT"),
                "{text}"
            );
        }
    }

    #[test]
    fn a_listener_on_all_addresses_is_reached_by_the_route_to_its_peer() {
        let all = SocketAddr::from(([0, 0, 0, 0], 9));
        assert_eq!(reachable(all, "127.0.0.1:29001").to_string(), "127.0.0.1:9");
        let one = SocketAddr::from(([127, 0, 0, 5], 9));
        assert_eq!(reachable(one, "127.0.0.1:29001"), one);
    }
}
