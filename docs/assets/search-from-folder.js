/* Search in pages that were opened from a folder. There a browser starts no worker, so the worker of the theme runs in a
 * hidden frame: postMessage in it reaches the page as an event, and the page's postMessage reaches it. Served pages are
 * left alone. The index is search/search_index.js (tools/site_hooks.py). */
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(address) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.ready = new Promise((resolve) => { this.start = resolve; });
      const begin = () => {
        document.body.append(this.frame);
        const inside = this.frame.contentWindow;
        inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
        const script = inside.document.createElement("script");
        script.src = address;
        script.addEventListener("load", () => this.start(inside));
        inside.document.body.append(script);
      };
      if (document.body) begin();
      else addEventListener("DOMContentLoaded", begin, { once: true });
    }

    postMessage(data) {
      this.ready.then((inside) => inside.dispatchEvent(new MessageEvent("message", { data })));
    }

    terminate() {
      this.frame.remove();
    }
  };
}
