// Browsers refuse workers to pages from the file system. There the search runs in a
// frame, with the messages of a worker.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const script = new URL(url, document.baseURI).href;
      const frame = (this.frame = document.createElement("iframe"));
      this.loaded = new Promise((resolve) => (frame.onload = resolve));
      frame.hidden = true;
      frame.srcdoc =
        "<script>receive = postMessage.bind(window);" +
        'postMessage = (data) => parent.postMessage(data, "*")</script>' +
        `<script src="${script}"></script>`;
      addEventListener("message", ({ source, data }) => {
        if (source === frame.contentWindow) {
          this.dispatchEvent(new MessageEvent("message", { data }));
        }
      });
      document.body.append(frame);
    }

    postMessage(data) {
      this.loaded.then(() => this.frame.contentWindow.receive(data, "*"));
    }
  };
}
