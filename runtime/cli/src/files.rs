//! Room for connections.

use rustix::process::{Resource, getrlimit, setrlimit};

/// Raises this process's limit on open files as far as the system lets it. Each client takes two, and the limit that shells
/// start with (1024, mostly) is one for programs that still use `select`.
pub(crate) fn raise_limit() {
    let mut limit = getrlimit(Resource::Nofile);
    if limit.current == limit.maximum {
        return;
    }
    limit.current = limit.maximum;
    if let Err(error) = setrlimit(Resource::Nofile, limit) {
        tracing::warn!(%error, "the limit on open files stays as it is");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limit_is_raised_as_far_as_it_goes() {
        let before = getrlimit(Resource::Nofile);
        let mut low = before;
        low.current = before
            .maximum
            .map_or(Some(512), |maximum| Some(maximum / 2));
        setrlimit(Resource::Nofile, low).expect("lower");
        assert_eq!(getrlimit(Resource::Nofile).current, low.current);
        raise_limit();
        let after = getrlimit(Resource::Nofile);
        assert_eq!(after.current, before.maximum);
        assert_eq!(after.maximum, before.maximum);
    }
}
