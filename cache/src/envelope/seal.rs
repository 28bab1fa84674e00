//! Entry to bytes.

use super::*;

/// Writes an entry. Takes time in proportion to it (compression and hashing: some milliseconds a megabyte), so it
/// belongs onto a thread that may block.
///
/// # Errors
/// When a part is over its limit; nothing is written in part.
pub fn seal(
    key: &Digest,
    entry: &Entry,
    provenance: &Provenance,
    limits: &Limits,
) -> Result<Bytes, SealError> {
    seal_signed(key, entry, provenance, limits, None)
}

/// [`seal`], signed if a key is given.
///
/// # Errors
/// As [`seal`], and [`SealError::NoSignature`] for a key that does not sign.
pub fn seal_signed(
    key: &Digest,
    entry: &Entry,
    provenance: &Provenance,
    limits: &Limits,
    signing: Option<&SigningKey>,
) -> Result<Bytes, SealError> {
    let provenance = serde_json::to_vec(provenance).map_err(|error| SealError::Encode {
        section: Kind::Provenance.name(),
        reason: error.to_string(),
    })?;
    let info = entry.info.encode_to_vec();
    let mut sections = vec![
        Section::new(Kind::Provenance, &provenance, limits)?,
        Section::new(Kind::Info, &info, limits)?,
        Section::new(Kind::Executable, &entry.executable, limits)?,
    ];
    if let Some(text) = &entry.text {
        sections.push(Section::packed(Kind::Text, text.0.clone(), limits)?);
    }
    let unsigned = vec![0; signing.map_or(0, SigningKey::signature_bytes)];
    if signing.is_some() {
        // Its place; what it is follows from all that is before it.
        sections.push(Section {
            kind: Kind::Signature,
            packed: Packed::raw(Bytes::copy_from_slice(&unsigned)),
        });
    }

    let table = sections.len() * ROW_BYTES;
    let body: usize = sections
        .iter()
        .map(|section| section.packed.stored.len())
        .sum();
    let total = HEADER_BYTES + table + body + CHECKSUM_BYTES;
    if total as u64 > limits.object {
        return Err(SealError::TooLarge {
            section: "entry",
            bytes: total as u64,
            limit: limits.object,
        });
    }

    let mut out = Vec::with_capacity(total);
    out.extend_from_slice(&MAGIC);
    out.extend_from_slice(&FORMAT.to_le_bytes());
    out.extend_from_slice(&(sections.len() as u32).to_le_bytes());
    out.extend_from_slice(&(total as u64).to_le_bytes());
    out.extend_from_slice(key);
    for section in &sections {
        out.extend_from_slice(&(section.kind as u32).to_le_bytes());
        out.extend_from_slice(&section.packed.encoding.to_le_bytes());
        out.extend_from_slice(&(section.packed.stored.len() as u64).to_le_bytes());
        out.extend_from_slice(&section.packed.decoded_bytes.to_le_bytes());
    }
    for section in &sections {
        out.extend_from_slice(&section.packed.stored);
    }
    if let Some(signing) = signing {
        let before = out.len() - unsigned.len();
        let signature = signing.sign(&out[..before]).ok_or(SealError::NoSignature)?;
        debug_assert_eq!(signature.len(), unsigned.len());
        out.truncate(before);
        out.extend_from_slice(&signature);
    }
    let checksum: Digest = Sha256::digest(&out).into();
    out.extend_from_slice(&checksum);
    Ok(Bytes::from(out))
}

struct Section {
    kind: Kind,
    packed: Packed,
}

impl Section {
    fn new(kind: Kind, data: &[u8], limits: &Limits) -> Result<Section, SealError> {
        within(kind, data.len() as u64, limits)?;
        let packed = Packed::of(data).map_err(|error| SealError::Encode {
            section: kind.name(),
            reason: error.to_string(),
        })?;
        Ok(Section { kind, packed })
    }

    fn packed(kind: Kind, packed: Packed, limits: &Limits) -> Result<Section, SealError> {
        within(kind, packed.decoded_bytes, limits)?;
        Ok(Section { kind, packed })
    }
}

/// # Errors
/// When a section is larger than allowed.
fn within(kind: Kind, bytes: u64, limits: &Limits) -> Result<(), SealError> {
    let limit = kind.limit(limits);
    if bytes <= limit {
        return Ok(());
    }
    Err(SealError::TooLarge {
        section: kind.name(),
        bytes,
        limit,
    })
}
