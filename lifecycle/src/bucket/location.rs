//! Locations as users write them.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use object_store::path::Path;
use url::Url;

use super::Error;

/// Where a bucket is. Parsing is pure: no file is touched and nothing is asked over the network.
///
/// [`fmt::Display`] writes a form that parses to the same location; it carries no credentials, so it may be logged.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Location {
    /// A folder of this machine (or of a file system mounted on it): `file:///path`, or the plain absolute path.
    File(PathBuf),
    /// This process's memory: `memory://`. Gone when the process ends, shared with nobody.
    Memory,
    /// Google Cloud Storage: `gs://bucket/prefix`.
    Gcs {
        /// Bucket name, never empty.
        bucket: String,
        /// Object name prefix, without slashes at its ends; may be empty.
        prefix: String,
    },
    /// Amazon S3 and what speaks like it: `s3://bucket/prefix`.
    S3 {
        /// Bucket name, never empty.
        bucket: String,
        /// Object key prefix, without slashes at its ends; may be empty.
        prefix: String,
    },
}

impl Location {
    /// Reads a location.
    ///
    /// # Errors
    /// Only such that say what to write instead ([`Error::is_usage`] is true for all of them).
    pub fn parse(text: &str) -> Result<Location, Error> {
        let text = text.trim();
        if text.is_empty() {
            return Err(Error::Empty);
        }
        if text.starts_with('/') {
            return Ok(Location::File(PathBuf::from(text)));
        }
        let Some((scheme, rest)) = text.split_once("://") else {
            return Err(match text.split_once(':') {
                Some((scheme, _)) => Error::UnknownScheme {
                    location: text.to_owned(),
                    scheme: scheme.to_owned(),
                },
                None => Error::RelativePath {
                    location: text.to_owned(),
                },
            });
        };
        match scheme.to_ascii_lowercase().as_str() {
            "file" => file(text, rest),
            "memory" if rest.trim_matches('/').is_empty() => Ok(Location::Memory),
            "memory" => Err(Error::MemoryWithPath {
                location: text.to_owned(),
            }),
            "gs" => {
                let (bucket, prefix) = bucket_and_prefix(text, "gs", rest)?;
                Ok(Location::Gcs { bucket, prefix })
            }
            "s3" => {
                let (bucket, prefix) = bucket_and_prefix(text, "s3", rest)?;
                Ok(Location::S3 { bucket, prefix })
            }
            _ => Err(Error::UnknownScheme {
                location: text.to_owned(),
                scheme: scheme.to_owned(),
            }),
        }
    }

    /// True for `memory://`, which a cache treats as no location.
    pub fn is_memory(&self) -> bool {
        matches!(self, Location::Memory)
    }
}

impl FromStr for Location {
    type Err = Error;

    fn from_str(text: &str) -> Result<Location, Error> {
        Location::parse(text)
    }
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let with_prefix = |f: &mut fmt::Formatter<'_>, scheme: &str, bucket: &str, prefix: &str| {
            write!(f, "{scheme}://{bucket}")?;
            if prefix.is_empty() {
                Ok(())
            } else {
                write!(f, "/{prefix}")
            }
        };
        match self {
            // Percent-encoded, so that any file name comes back. A path that no URL can hold is written plainly.
            Location::File(path) => match Url::from_file_path(path) {
                Ok(url) => f.write_str(url.as_str()),
                Err(()) => write!(f, "{}", path.display()),
            },
            Location::Memory => f.write_str("memory://"),
            Location::Gcs { bucket, prefix } => with_prefix(f, "gs", bucket, prefix),
            Location::S3 { bucket, prefix } => with_prefix(f, "s3", bucket, prefix),
        }
    }
}

/// `file://` URLs are percent-decoded, as TensorStore and browsers do it.
fn file(text: &str, rest: &str) -> Result<Location, Error> {
    let not_local = |reason| Error::NotLocal {
        location: text.to_owned(),
        reason,
    };
    if rest.is_empty() || rest.starts_with('.') {
        return Err(Error::RelativePath {
            location: text.to_owned(),
        });
    }
    let url = Url::parse(text).map_err(|_| not_local("not a URL"))?;
    if url.host_str().is_some_and(|host| host != "localhost") {
        return Err(not_local("it names a host"));
    }
    if url.query().is_some() || url.fragment().is_some() {
        return Err(not_local("write '?' as %3F and '#' as %23"));
    }
    let path = url
        .to_file_path()
        .map_err(|()| not_local("not an absolute path"))?;
    Ok(Location::File(path))
}

fn bucket_and_prefix(
    text: &str,
    scheme: &'static str,
    rest: &str,
) -> Result<(String, String), Error> {
    let (bucket, prefix) = rest.split_once('/').unwrap_or((rest, ""));
    if bucket.is_empty() {
        return Err(Error::EmptyBucket {
            location: text.to_owned(),
            scheme,
        });
    }
    let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    if let Some(found) = bucket.chars().find(|&c| !allowed(c)) {
        return Err(Error::BadBucketName {
            location: text.to_owned(),
            bucket: bucket.to_owned(),
            found,
        });
    }
    let prefix = prefix.trim_matches('/');
    Path::parse(prefix).map_err(|source| Error::BadPrefix {
        location: text.to_owned(),
        source,
    })?;
    Ok((bucket.to_owned(), prefix.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Location {
        Location::parse(text).expect(text)
    }

    fn refused(text: &str) -> String {
        let error = Location::parse(text).expect_err(text);
        assert!(error.is_usage(), "{text}");
        error.to_string()
    }

    #[test]
    fn reads_each_scheme_and_writes_it_back() {
        assert_eq!(parse("file:///a/b"), Location::File("/a/b".into()));
        assert_eq!(parse("/a/b c%20"), Location::File("/a/b c%20".into()));
        assert_eq!(
            parse("file:///a/b%20c%3F"),
            Location::File("/a/b c?".into())
        );
        assert_eq!(parse("file://localhost/a"), Location::File("/a".into()));
        assert_eq!(parse(" memory:// "), Location::Memory);
        let gcs = |bucket: &str, prefix: &str| Location::Gcs {
            bucket: bucket.into(),
            prefix: prefix.into(),
        };
        assert_eq!(parse("gs://b"), gcs("b", ""));
        assert_eq!(parse("gs://b/"), gcs("b", ""));
        assert_eq!(parse("gs://my-b.x_1/p/q/"), gcs("my-b.x_1", "p/q"));
        assert_eq!(
            parse("s3://b/p"),
            Location::S3 {
                bucket: "b".into(),
                prefix: "p".into()
            }
        );
        for text in [
            "file:///a/b%20c%3F%23%25",
            "/a/%41/ü",
            "memory://",
            "gs://b",
            "gs://b/p/q",
            "s3://b/p",
        ] {
            let location = parse(text);
            assert_eq!(parse(&location.to_string()), location, "{text}");
        }
        assert_eq!(parse("gs://b/p/q/").to_string(), "gs://b/p/q");
    }

    #[test]
    fn refuses_what_cannot_be_meant_and_says_what_to_write() {
        assert!(refused("").contains("file:///path"));
        assert!(refused("ftp://x/y").contains("'ftp'"));
        assert!(refused("gcs://b/p").contains("gs://bucket/prefix"));
        assert!(refused("c:\\x").contains("unknown scheme 'c'"));
        assert!(refused("some/where").contains("relative path"));
        assert!(refused("./x").contains("relative path"));
        assert!(refused("file://").contains("relative path"));
        assert!(refused("file://./x").contains("relative path"));
        assert!(refused("file://host/x").contains("three slashes"));
        assert!(refused("file:///x?y").contains("%3F"));
        assert!(refused("gs://").contains("gs://BUCKET/PREFIX"));
        assert!(refused("gs:///prefix").contains("names no bucket"));
        assert!(refused("s3://").contains("s3://BUCKET/PREFIX"));
        assert!(refused("gs://a b/x").contains("' '"));
        assert!(refused("gs://a/x//y").contains("'//'"));
        assert!(refused("gs://a/x/../y").contains("'..'"));
        assert!(refused("memory://x").contains("write memory://"));
    }
}
