//! Holds one set of protobuf descriptors against another: whatever ours declares must mean the same bytes in theirs.

use std::{
    collections::BTreeMap,
    fmt::{self, Display},
};

use prost_types::{
    DescriptorProto, EnumDescriptorProto, FieldDescriptorProto, FileDescriptorProto,
    ServiceDescriptorProto,
    field_descriptor_proto::{Label, Type},
};

/// One place where the two sets do not agree.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Difference {
    /// Ours declares it, theirs has no such thing (a message, an enum, a field, an enum value, a service, a method).
    Missing(String),
    /// Both declare it, differently.
    Different {
        /// Full name, such as "xla.ifrt.proxy.InitResponse.session_id".
        name: String,
        /// How ours has it.
        ours: String,
        /// How theirs has it.
        theirs: String,
    },
}

impl Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Missing(name) => write!(f, "{name}: not in theirs"),
            Self::Different { name, ours, theirs } => {
                write!(f, "{name}: ours is [{ours}], theirs is [{theirs}]")
            }
        }
    }
}

/// Everything that `ours` declares and `theirs` does not have in the same form, sorted by name. What only theirs declares
/// is no difference: a reader skips fields that it does not know.
///
/// A field's form is its number, type, label, presence, packedness and real oneof; an enum value's its number; a map's
/// that it is one; a method's its types and which sides stream. When a message is missing, its fields are not listed.
#[must_use]
pub fn differences<'a>(
    ours: impl IntoIterator<Item = &'a FileDescriptorProto>,
    theirs: impl IntoIterator<Item = &'a FileDescriptorProto>,
) -> Vec<Difference> {
    let (ours, theirs) = (forms(ours), forms(theirs));
    let mut found = Vec::new();
    for (name, form) in &ours {
        match theirs.get(name) {
            Some(other) if other == form => {}
            Some(other) => found.push(Difference::Different {
                name: name.clone(),
                ours: form.clone(),
                theirs: other.clone(),
            }),
            None => {
                let parent_is_there = name.rsplit_once('.').is_none_or(|(parent, _)| {
                    !ours.contains_key(parent) || theirs.contains_key(parent)
                });
                if parent_is_there {
                    found.push(Difference::Missing(name.clone()));
                }
            }
        }
    }
    found
}

/// Full name of everything declared -> its form, as text that two sides can be compared by and a person can read.
fn forms<'a>(files: impl IntoIterator<Item = &'a FileDescriptorProto>) -> BTreeMap<String, String> {
    let mut forms = BTreeMap::new();
    for file in files {
        let syntax = Syntax(file.syntax() == "proto3");
        for message in &file.message_type {
            syntax.message(file.package(), message, &mut forms);
        }
        for declared in &file.enum_type {
            enumeration(file.package(), declared, &mut forms);
        }
        for declared in &file.service {
            service(file.package(), declared, &mut forms);
        }
    }
    forms
}

/// Whether the file is proto3; presence and packedness depend on it.
#[derive(Clone, Copy)]
struct Syntax(bool);

impl Syntax {
    fn message(self, scope: &str, message: &DescriptorProto, forms: &mut BTreeMap<String, String>) {
        let name = format!("{scope}.{}", message.name());
        let is_map_entry = message
            .options
            .as_ref()
            .is_some_and(|options| options.map_entry());
        forms.insert(
            name.clone(),
            if is_map_entry { "map entry" } else { "message" }.to_owned(),
        );
        for field in &message.field {
            forms.insert(
                format!("{name}.{}", field.name()),
                self.field(message, field),
            );
        }
        for nested in &message.nested_type {
            self.message(&name, nested, forms);
        }
        for declared in &message.enum_type {
            enumeration(&name, declared, forms);
        }
    }

    fn field(self, message: &DescriptorProto, field: &FieldDescriptorProto) -> String {
        let mut form = format!("number {}, {:?}", field.number(), field.r#type());
        if !field.type_name().is_empty() {
            form += &format!(" {}", field.type_name());
        }
        form += &format!(", {:?}", field.label());
        let oneof = field.oneof_index.filter(|_| !field.proto3_optional());
        if let Some(index) = oneof {
            let name = usize::try_from(index)
                .ok()
                .and_then(|index| message.oneof_decl.get(index));
            form += &format!(", oneof {}", name.map_or("?", |oneof| oneof.name()));
        }
        let is_message = matches!(field.r#type(), Type::Message | Type::Group);
        let has_presence = field.label() != Label::Repeated
            && (is_message || oneof.is_some() || field.proto3_optional() || !self.0);
        if has_presence {
            form += ", presence";
        }
        let packable = field.label() == Label::Repeated
            && !is_message
            && !matches!(field.r#type(), Type::String | Type::Bytes);
        if packable {
            let packed = field
                .options
                .as_ref()
                .and_then(|options| options.packed)
                .unwrap_or(self.0);
            form += if packed { ", packed" } else { ", not packed" };
        }
        form
    }
}

fn enumeration(scope: &str, declared: &EnumDescriptorProto, forms: &mut BTreeMap<String, String>) {
    let name = format!("{scope}.{}", declared.name());
    forms.insert(name.clone(), "enum".to_owned());
    for value in &declared.value {
        forms.insert(
            format!("{name}.{}", value.name()),
            format!("value {}", value.number()),
        );
    }
}

fn service(scope: &str, declared: &ServiceDescriptorProto, forms: &mut BTreeMap<String, String>) {
    let name = format!("{scope}.{}", declared.name());
    forms.insert(name.clone(), "service".to_owned());
    for method in &declared.method {
        let stream = |streams: bool| if streams { "stream of " } else { "" };
        let form = format!(
            "takes {}{}, returns {}{}",
            stream(method.client_streaming()),
            method.input_type(),
            stream(method.server_streaming()),
            method.output_type()
        );
        forms.insert(format!("{name}.{}", method.name()), form);
    }
}

#[cfg(test)]
mod tests {
    use prost_types::{
        EnumValueDescriptorProto, FieldOptions, MessageOptions, MethodDescriptorProto,
        OneofDescriptorProto,
    };

    use super::*;

    /// One of everything that can differ.
    fn sample() -> FileDescriptorProto {
        let field = |name: &str, number, kind: Type, label: Label| FieldDescriptorProto {
            name: Some(name.to_owned()),
            number: Some(number),
            r#type: Some(kind.into()),
            label: Some(label.into()),
            ..Default::default()
        };
        let mut choice = field("choice", 3, Type::Bool, Label::Optional);
        choice.oneof_index = Some(0);
        FileDescriptorProto {
            package: Some("p".to_owned()),
            syntax: Some("proto3".to_owned()),
            message_type: vec![DescriptorProto {
                name: Some("M".to_owned()),
                field: vec![
                    field("single", 1, Type::Int64, Label::Optional),
                    field("many", 2, Type::Int64, Label::Repeated),
                    choice,
                ],
                nested_type: vec![DescriptorProto {
                    name: Some("E".to_owned()),
                    options: Some(MessageOptions {
                        map_entry: Some(true),
                        ..Default::default()
                    }),
                    ..Default::default()
                }],
                oneof_decl: vec![OneofDescriptorProto {
                    name: Some("which".to_owned()),
                    options: None,
                }],
                ..Default::default()
            }],
            enum_type: vec![EnumDescriptorProto {
                name: Some("K".to_owned()),
                value: vec![EnumValueDescriptorProto {
                    name: Some("ONE".to_owned()),
                    number: Some(1),
                    options: None,
                }],
                ..Default::default()
            }],
            service: vec![ServiceDescriptorProto {
                name: Some("S".to_owned()),
                method: vec![MethodDescriptorProto {
                    name: Some("Call".to_owned()),
                    input_type: Some(".p.M".to_owned()),
                    output_type: Some(".p.M".to_owned()),
                    ..Default::default()
                }],
                options: None,
            }],
            ..Default::default()
        }
    }

    /// The names that differ once `change` is made to theirs.
    fn differing(change: impl FnOnce(&mut FileDescriptorProto)) -> Vec<String> {
        let (ours, mut theirs) = (sample(), sample());
        change(&mut theirs);
        differences([&ours], [&theirs])
            .into_iter()
            .map(|difference| match difference {
                Difference::Missing(name) => format!("-{name}"),
                Difference::Different { name, .. } => name,
            })
            .collect()
    }

    #[test]
    fn equal_sets_agree_and_fields_of_theirs_alone_do_not_matter() {
        assert!(differing(|_| {}).is_empty());
        assert!(
            differing(|file| {
                let mut more = file.message_type[0].field[0].clone();
                more.name = Some("more".to_owned());
                more.number = Some(9);
                file.message_type[0].field.push(more);
            })
            .is_empty()
        );
    }

    #[test]
    fn every_kind_of_difference_is_named() {
        let field = |index: usize, change: fn(&mut FieldDescriptorProto)| {
            differing(|file| change(&mut file.message_type[0].field[index]))
        };
        assert_eq!(field(0, |field| field.number = Some(7)), ["p.M.single"]);
        assert_eq!(
            field(0, |field| field.r#type = Some(Type::Uint64.into())),
            ["p.M.single"]
        );
        assert_eq!(
            field(0, |field| field.label = Some(Label::Repeated.into())),
            ["p.M.single"]
        );
        assert_eq!(
            field(0, |field| field.proto3_optional = Some(true)),
            ["p.M.single"]
        );
        assert_eq!(
            field(1, |field| field.options = Some(FieldOptions {
                packed: Some(false),
                ..Default::default()
            })),
            ["p.M.many"]
        );
        assert_eq!(field(2, |field| field.oneof_index = None), ["p.M.choice"]);
        assert_eq!(
            differing(|file| file.syntax = None),
            ["p.M.many", "p.M.single"]
        );
        assert_eq!(
            differing(|file| file.message_type[0].nested_type[0].options = None),
            ["p.M.E"]
        );
        assert_eq!(
            differing(|file| file.enum_type[0].value[0].number = Some(2)),
            ["p.K.ONE"]
        );
        assert_eq!(
            differing(|file| file.service[0].method[0].server_streaming = Some(true)),
            ["p.S.Call"]
        );
        assert_eq!(
            differing(|file| file.message_type[0].field.truncate(2)),
            ["-p.M.choice"]
        );
        assert_eq!(differing(|file| file.message_type.clear()), ["-p.M"]);
    }
}
