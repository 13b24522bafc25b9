"""What a broker reports about itself: Prometheus metrics, log lines, the controller's timeline file."""
