//! The double as a process of its own: `gcs_double --port 0 --ready_file F [--bucket B]...`. It ends when its stdin does.

use std::path::PathBuf;

use clap::Parser as _;
use tokio::net::TcpListener;
use waystation_gcs_double::Double;

/// A test double of Cloud Storage (XML and JSON APIs over one store in memory)
#[derive(Debug, clap::Parser)]
struct Args {
    /// Address to listen on
    #[arg(long = "bind_address", default_value = "127.0.0.1")]
    bind_address: std::net::IpAddr,
    /// Port to listen on; 0 takes a free one
    #[arg(long = "port", default_value_t = 0)]
    port: u16,
    /// File to write http://HOST:PORT to, once it listens
    #[arg(long = "ready_file")]
    ready_file: Option<PathBuf>,
    /// Bucket to begin with; may be given several times
    #[arg(long = "bucket")]
    bucket: Vec<String>,
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> std::io::Result<()> {
    let args = Args::parse();
    let double = Double::listen(TcpListener::bind((args.bind_address, args.port)).await?)?;
    for bucket in &args.bucket {
        double.create_bucket(bucket);
    }
    if let Some(file) = args.ready_file {
        // Renamed into place, so that nobody reads half of it.
        let new = file.with_extension("new");
        std::fs::write(&new, double.url())?;
        std::fs::rename(new, file)?;
    }
    std::thread::spawn(|| {
        // An error means as much as the end.
        let _ = std::io::copy(&mut std::io::stdin().lock(), &mut std::io::sink());
        std::process::exit(0);
    });
    double.wait().await;
    Ok(())
}
