//! Reader of StableHLO portable artifacts (MLIR bytecode).
