//! The resource manager: workers register, are watched, and give a proxy its devices.
