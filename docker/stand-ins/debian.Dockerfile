# Stands in for debian:trixie-slim in tests (scripts/base_images.sh): a minimal system, this machine's certificates.
FROM scratch
ADD system.tar /
COPY certificates /etc/ssl/certs/ca-certificates.crt
CMD ["bash"]
