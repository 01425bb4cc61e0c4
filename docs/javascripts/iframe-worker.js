// The search runs in a Worker, which browsers refuse to a page that was opened from a file. There a hidden frame takes
// its place. (The theme's own stand-in comes from another server; this file's name keeps the theme from asking for it.)
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.body.appendChild(document.createElement("iframe"));
      this.frame.hidden = true;
      const { contentWindow: inside, contentDocument: page } = this.frame;
      inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }));
      this.ready = new Promise(resolve => {
        const script = page.createElement("script");
        script.src = url;
        script.onload = resolve;
        page.body.appendChild(script);
      });
    }
    postMessage(data) {
      const { contentWindow: inside } = this.frame;
      this.ready.then(() => inside.dispatchEvent(new inside.MessageEvent("message", { data })));
    }
    terminate() {
      this.frame.remove();
    }
  };
}
