//! How to open the plugin, as a message.

use std::{
    ffi::OsStr,
    os::unix::ffi::OsStrExt as _,
    path::{Path, PathBuf},
};

use bytes::Bytes;
use waystation_pjrt::OptionValue;
use waystation_proto::waystation::compile::{
    Option as NamedOption, Setup,
    option::{Numbers, Value},
};

use crate::plugin::Spec;

pub(super) fn encode(spec: &Spec) -> Setup {
    Setup {
        plugin: bytes_of(&spec.path),
        options: spec.options.iter().map(encode_option).collect(),
        lapack: spec.lapack.as_deref().map(bytes_of),
    }
}

pub(super) fn decode(setup: Setup) -> Spec {
    Spec {
        path: path_of(&setup.plugin),
        options: setup
            .options
            .into_iter()
            .filter_map(decode_option)
            .collect(),
        lapack: setup.lapack.as_deref().map(path_of),
        group: None,
    }
}

fn bytes_of(path: &Path) -> Bytes {
    Bytes::copy_from_slice(path.as_os_str().as_bytes())
}

fn path_of(bytes: &[u8]) -> PathBuf {
    OsStr::from_bytes(bytes).into()
}

fn encode_option((name, value): &(String, OptionValue)) -> NamedOption {
    let value = match value {
        OptionValue::String(text) => Value::Text(text.clone()),
        OptionValue::Int64(number) => Value::Number(*number),
        OptionValue::Int64List(numbers) => Value::Numbers(Numbers {
            numbers: numbers.clone(),
        }),
        OptionValue::Float(real) => Value::Real(*real),
        OptionValue::Bool(truth) => Value::Truth(*truth),
    };
    NamedOption {
        name: name.clone(),
        value: Some(value),
    }
}

fn decode_option(option: NamedOption) -> Option<(String, OptionValue)> {
    let value = match option.value? {
        Value::Text(text) => OptionValue::String(text),
        Value::Number(number) => OptionValue::Int64(number),
        Value::Numbers(list) => OptionValue::Int64List(list.numbers),
        Value::Real(real) => OptionValue::Float(real),
        Value::Truth(truth) => OptionValue::Bool(truth),
    };
    Some((option.name, value))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plugin_is_opened_as_the_worker_opened_it() {
        let named = |name: &str, value| (name.to_owned(), value);
        let spec = Spec {
            path: path_of(b"/odd/\xff.so"),
            options: vec![
                named("text", OptionValue::String("t".to_owned())),
                named("number", OptionValue::Int64(-8)),
                named("numbers", OptionValue::Int64List(vec![1, i64::MIN])),
                named("real", OptionValue::Float(0.5)),
                named("truth", OptionValue::Bool(true)),
            ],
            lapack: Some("/lib.so".into()),
            group: None,
        };
        let back = decode(encode(&spec));
        assert_eq!(back.path, spec.path);
        assert_eq!(back.options, spec.options);
        assert_eq!(back.lapack, spec.lapack);
        let bare = Spec {
            lapack: None,
            ..spec
        };
        assert_eq!(decode(encode(&bare)).lapack, None);
    }
}
