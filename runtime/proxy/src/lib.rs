//! The IFRT proxy server: sessions, handles, ordering, host buffers.
