//! Signatures of entries, for who shares a bucket with somebody who must not choose what runs on the devices.
//!
//! A key file holds one of
//! * a secret of 32 bytes or more, as hex digits or as it is (`openssl rand -hex 32`): HMAC-SHA256;
//! * an Ed25519 private key as PEM (`openssl genpkey -algorithm ed25519`): signs and checks;
//! * an Ed25519 public key as PEM (`openssl pkey -in KEY -pubout`): checks only, so nothing is published.
//!
//! What is signed is everything of the object before the signature: the key it is for, the section table, all sections.

use std::fmt;
use std::path::Path;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use ring::hmac;
use ring::signature::{ED25519, Ed25519KeyPair, KeyPair as _, UnparsedPublicKey};

/// A secret below this many bytes could be guessed.
const SECRET_BYTES: usize = 32;

/// A key file is no larger than this.
const FILE_BYTES: u64 = 64 << 10;

/// The DER of an Ed25519 public key up to the key itself (RFC 8410).
const PUBLIC_PREFIX: [u8; 12] = [
    0x30, 0x2a, 0x30, 0x05, 0x06, 0x03, 0x2b, 0x65, 0x70, 0x03, 0x21, 0x00,
];

/// First byte of a signature: how it was made.
const BY_HMAC: u8 = 1;
const BY_ED25519: u8 = 2;

/// A key that signs entries, checks them, or both. Shows nothing of itself.
pub struct SigningKey(Kind);

enum Kind {
    Hmac(hmac::Key),
    Pair(Box<Ed25519KeyPair>),
    Public(Vec<u8>),
}

/// A key file that cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KeyError {
    /// It cannot be read.
    #[error("key file cannot be read")]
    Unreadable(#[from] std::io::Error),
    /// A secret that is too short.
    #[error(
        "secret has {bytes} bytes and needs {SECRET_BYTES}; make one with `openssl rand -hex 32`"
    )]
    Short {
        /// Bytes that it has.
        bytes: usize,
    },
    /// PEM of something else.
    #[error(
        "PEM file holds no Ed25519 key ({reason}); make one with `openssl genpkey -algorithm ed25519`"
    )]
    Pem {
        /// What is wrong with it.
        reason: String,
    },
    /// Far too long.
    #[error("key file has more than {FILE_BYTES} bytes")]
    Long,
}

impl SigningKey {
    /// Reads a key file. Blocks.
    ///
    /// # Errors
    /// [`KeyError`], for the user to mend.
    pub fn read(path: &Path) -> Result<SigningKey, KeyError> {
        use std::io::Read as _;
        let mut text = Vec::new();
        let file = std::fs::File::open(path)?;
        file.take(FILE_BYTES + 1).read_to_end(&mut text)?;
        if text.len() as u64 > FILE_BYTES {
            return Err(KeyError::Long);
        }
        SigningKey::parse(&text)
    }

    /// The key in the content of a key file.
    ///
    /// # Errors
    /// [`KeyError`], for the user to mend.
    pub fn parse(content: &[u8]) -> Result<SigningKey, KeyError> {
        let text = std::str::from_utf8(content).map(str::trim);
        if let Ok(text) = text
            && text.starts_with("-----BEGIN")
        {
            return SigningKey::of_pem(text);
        }
        let secret = text
            .ok()
            .and_then(|text| hex::decode(text).ok())
            .unwrap_or_else(|| content.to_vec());
        if secret.len() < SECRET_BYTES {
            let bytes = secret.len();
            return Err(KeyError::Short { bytes });
        }
        let key = hmac::Key::new(hmac::HMAC_SHA256, &secret);
        Ok(SigningKey(Kind::Hmac(key)))
    }

    fn of_pem(text: &str) -> Result<SigningKey, KeyError> {
        let bad = |reason: &dyn fmt::Display| KeyError::Pem {
            reason: reason.to_string(),
        };
        let body: String = text
            .lines()
            .filter(|line| !line.starts_with("-----"))
            .map(str::trim)
            .collect();
        let der = STANDARD.decode(body).map_err(|error| bad(&error))?;
        if text.starts_with("-----BEGIN PUBLIC KEY-----") {
            return match der.strip_prefix(&PUBLIC_PREFIX) {
                Some(public) if public.len() == 32 => Ok(SigningKey(Kind::Public(public.to_vec()))),
                _ => Err(bad(&"another kind of public key")),
            };
        }
        // What `openssl` writes has no public key in it.
        let pair = Ed25519KeyPair::from_pkcs8_maybe_unchecked(&der).map_err(|error| bad(&error))?;
        Ok(SigningKey(Kind::Pair(Box::new(pair))))
    }

    /// False where the key only checks.
    pub fn signs(&self) -> bool {
        !matches!(self.0, Kind::Public(_))
    }

    /// The signature; `None` where the key only checks.
    pub(crate) fn sign(&self, message: &[u8]) -> Option<Vec<u8>> {
        let (by, signature) = match &self.0 {
            Kind::Hmac(key) => (BY_HMAC, hmac::sign(key, message).as_ref().to_vec()),
            Kind::Pair(pair) => (BY_ED25519, pair.sign(message).as_ref().to_vec()),
            Kind::Public(_) => return None,
        };
        Some([vec![by], signature].concat())
    }

    /// Bytes of every signature of this key.
    pub(crate) fn signature_bytes(&self) -> usize {
        1 + match &self.0 {
            Kind::Hmac(_) => 32,
            Kind::Pair(_) | Kind::Public(_) => 64,
        }
    }

    /// Whether this key, or its other half, has signed the message.
    pub(crate) fn verifies(&self, message: &[u8], signature: &[u8]) -> bool {
        let Some((&by, signature)) = signature.split_first() else {
            return false;
        };
        let by_public = |public: &[u8]| {
            let public = UnparsedPublicKey::new(&ED25519, public);
            by == BY_ED25519 && public.verify(message, signature).is_ok()
        };
        match &self.0 {
            Kind::Hmac(key) => by == BY_HMAC && hmac::verify(key, message, signature).is_ok(),
            Kind::Pair(pair) => by_public(pair.public_key().as_ref()),
            Kind::Public(public) => by_public(public),
        }
    }
}

impl fmt::Debug for SigningKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match &self.0 {
            Kind::Hmac(_) => "SigningKey(HMAC-SHA256)",
            Kind::Pair(_) => "SigningKey(Ed25519)",
            Kind::Public(_) => "SigningKey(Ed25519, public)",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Made by `openssl genpkey -algorithm ed25519` and `openssl pkey -pubout`, for this test.
    const PRIVATE: &str = "-----BEGIN PRIVATE KEY-----
MC4CAQAwBQYDK2VwBCIEIPQrcHN3nAmX+yuTVBshXRZqvu1xGjQP/TQYzi9+iGNl
-----END PRIVATE KEY-----
";
    const PUBLIC: &str = "-----BEGIN PUBLIC KEY-----
MCowBQYDK2VwAyEAMywIHEo6rSkRyfU9l5SSVby5mZil7ZypHTRNvGPiZb8=
-----END PUBLIC KEY-----
";
    const SECRET: &[u8] = b"00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff\n";

    fn key(content: impl AsRef<[u8]>) -> SigningKey {
        SigningKey::parse(content.as_ref()).unwrap()
    }

    #[test]
    fn a_signature_holds_for_its_message_and_its_key_alone() {
        let (secret, pair, public) = (key(SECRET), key(PRIVATE), key(PUBLIC));
        let raw = key([7; 32]);
        for (signer, friends, strangers) in [
            (&secret, vec![&secret], vec![&raw, &pair, &public]),
            (&pair, vec![&pair, &public], vec![&raw, &secret]),
        ] {
            let signature = signer.sign(b"message").unwrap();
            assert_eq!(signature.len(), signer.signature_bytes());
            for friend in friends {
                assert!(friend.verifies(b"message", &signature));
                assert!(!friend.verifies(b"messagE", &signature));
                for at in 0..signature.len() {
                    let mut other = signature.clone();
                    other[at] ^= 1;
                    assert!(!friend.verifies(b"message", &other));
                    assert!(!friend.verifies(b"message", &signature[..at]));
                }
            }
            for stranger in strangers {
                assert!(!stranger.verifies(b"message", &signature));
            }
        }
        assert!(secret.signs() && pair.signs() && !public.signs());
        assert!(public.sign(b"message").is_none());
    }

    #[test]
    fn hex_and_the_bytes_it_means_are_one_secret() {
        let bytes = hex::decode(SECRET.trim_ascii()).unwrap();
        let signature = key(SECRET).sign(b"m").unwrap();
        assert!(key(bytes).verifies(b"m", &signature));
    }

    #[test]
    fn files_that_hold_no_key_say_what_to_do() {
        let error = |content: &[u8]| SigningKey::parse(content).unwrap_err().to_string();
        assert!(error(b"").contains("0 bytes"));
        assert!(error(b"too short\n").contains("openssl rand"));
        let cut = PRIVATE.replace("MC4C", "MC4");
        for pem in [cut.as_bytes(), b"-----BEGIN PUBLIC KEY-----\nAAAA\n"] {
            assert!(error(pem).contains("openssl genpkey"));
        }
        for shown in [key(SECRET), key(PRIVATE), key(PUBLIC)] {
            let shown = format!("{shown:?}");
            assert!(shown.len() < 40, "{shown}");
        }
    }
}
